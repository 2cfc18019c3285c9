"""Torch's stores: what is below their prefixes, and those in files, which outlive their groups."""

from __future__ import annotations

import ctypes

import torch.distributed as dist

DESCRIPTORS = "/proc/self/fd/"


def innermost(store: dist.Store) -> dist.Store:
    """The store below all prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def kept(store: dist.Store) -> dist.Store:
    """``store``, which is never destroyed if it is one in a memory file of a launcher.

    Its destructor opens the file once more, and where that fails, as for a process that has no descriptor left, torch
    ends the process with SIGABRT, which hides why it was ending. Such a store holds nothing open. Files with a name are
    removed by that destructor, so that a program can use the name again.
    """
    underlying = innermost(store)
    path = getattr(underlying, "path", "") if isinstance(underlying, dist.FileStore) else ""
    if path.startswith(DESCRIPTORS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store
