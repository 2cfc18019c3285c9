"""Copies of states that training no longer changes, for a writer in the background."""

from __future__ import annotations

import contextlib
import copy
import mmap
from typing import Any

import torch

from accelerate_cpp._native import copy_tensors
from accelerate_cpp.checkpoint.safetensors_file import place_of
from accelerate_cpp.devices.tree import leaves_of

_ALIGNMENT = 64  # bytes


class SnapshotMemory:
    """Memory that is kept from one snapshot to the next: allocating it takes longer than copying.

    It can only hold one snapshot at a time.
    """

    def __init__(self) -> None:
        self._block: mmap.mmap | None = None

    def at_least(self, size: int) -> mmap.mmap | None:
        """A block of ``size`` bytes or more; ``None`` for 0."""
        if self._block is None or len(self._block) < size:
            self._block = None  # before there is another
            # Memory that processes share takes longer to get.
            self._block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if size > 0 else None
            if self._block is not None and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    self._block.madvise(mmap.MADV_HUGEPAGE)  # a first copy into small pages takes five times as long
        return self._block

    def release(self) -> None:
        """Returns it to the system once it no longer holds a snapshot."""
        self._block = None


def snapshot(state: Any, memory: SnapshotMemory) -> Any:
    """A deep copy of ``state`` on the CPU, whose plain tensors are in ``memory``.

    Tensors that share memory also share it in the copy.
    """
    tensors = {id(tensor): tensor for tensor in leaves_of(state) if _is_plain(tensor)}
    owners = {place_of(tensor): tensor for tensor in tensors.values()}
    sizes = {place: -(-_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT for place, tensor in owners.items()}
    block = memory.at_least(sum(sizes.values()))
    copies, begin = {}, 0
    plain: list[tuple[torch.Tensor, torch.Tensor]] = []
    for place, tensor in owners.items():
        copies[place] = room = _room_for(tensor, block, begin)
        begin += sizes[place]
        if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
            plain.append((room, tensor.detach()))
        else:
            room.copy_(tensor.detach())
    # In one call: torch's copy waits for its other threads after every tensor, which takes long when cores are busy.
    copy_tensors([room for room, _ in plain], [tensor for _, tensor in plain], torch.get_num_threads())
    # deepcopy uses the memo's entry for an object instead of copying it.
    memo: dict[int, Any] = {key: copies[place_of(tensor)] for key, tensor in tensors.items()}
    return copy.deepcopy(state, memo)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _room_for(tensor: torch.Tensor, block: mmap.mmap | None, begin: int) -> torch.Tensor:
    if block is None or tensor.numel() == 0:
        return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format, requires_grad=False)
    room = torch.frombuffer(block, dtype=torch.uint8, count=_bytes(tensor), offset=begin)
    return room.view(tensor.dtype).reshape(tensor.shape)


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and (
        value.layout is torch.strided and value.device.type != "meta" and not value.is_quantized
    )
