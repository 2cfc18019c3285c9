"""Torch's stores in files, kept until their process has ended."""

from __future__ import annotations

import ctypes

import torch.distributed as dist


def kept(store: dist.Store) -> dist.Store:
    """``store``, which is never destroyed if it is one in a file.

    Its destructor opens the file once more, and where that fails, as for a process that has no descriptor left, torch
    ends the process with SIGABRT, which hides why it was ending. Such a store holds nothing open.
    """
    underlying = store
    while isinstance(underlying, dist.PrefixStore):
        underlying = underlying.underlying_store
    if isinstance(underlying, dist.FileStore):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    return store
