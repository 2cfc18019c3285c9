"""Copies of states that are mapped from files, in memory of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch

from accelerate_cpp._native import copy_tensors
from accelerate_cpp.devices.tree import leaves_of


def off_the_file(state: Any) -> Any:
    """A deep copy of nested ``state``, whose tensors are mapped from a file, with tensors that have memory of their
    own.

    Strides are kept, and tensors that share memory also share it in the copy.
    """
    storages = {}
    for tensor in leaves_of(state):
        # Others, such as DTensors, consist of tensors, which deepcopy clones.
        if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.is_cpu:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage
    copies = {key: torch.empty(storage.nbytes(), dtype=torch.uint8) for key, storage in storages.items()}
    sources = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
    copy_tensors(list(copies.values()), sources, torch.get_num_threads())
    # Where deepcopy of a tensor looks for a copy of its storage that there is already.
    memo: dict[Any, Any] = {"torch": {key: one.untyped_storage() for key, one in copies.items()}}
    return copy.deepcopy(state, memo)
