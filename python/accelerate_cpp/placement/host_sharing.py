"""One copy of weights for all processes of a host."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelerate_cpp import _native
from accelerate_cpp.comm.gather import all_gather_object
from accelerate_cpp.comm.hosts import host_identity
from accelerate_cpp.comm.topology import process_index, world_size
from accelerate_cpp.errors import InvalidArgument, SystemFailure

__all__ = ["share_on_host"]

_ALIGNMENT = 64

# Of each tensor: name, dtype, shape, and where it begins.
_Layout = list[tuple[str, torch.dtype, tuple[int, ...], int]]
# Of a file in memory: a descriptor of the process that made it, its device and inode.
_File = tuple[int, int, int]


def share_on_host(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU with the values of ``state_dict``, in one copy for all processes of a host.

    A collective: all processes call it, with weights of the same names, shapes and dtypes; the values are those of the
    first process of each host. For weights that are kept on the CPU, each process of which would need memory for all::

        weights = share_on_host(model.state_dict())
        cpu_offload(model, execution_device=accelerator.device, state_dict=weights)

    What one process changes in place the others do not see. The memory has no name and goes with the last process that
    uses it. Where memory cannot be shared (anywhere but on Linux), and with one process, the tensors are returned as
    they are.

    Raises:
        InvalidArgument: on all processes, if they differ in names, shapes or dtypes, or a tensor has no values or is
            not dense.
        SystemFailure: on all processes, if a host has too little memory.
    """
    tensors = {name: tensor.detach() for name, tensor in state_dict.items()}
    if world_size() == 1 or sys.platform != "linux":
        return tensors
    layout, total = _layout_of(tensors)
    wrong = next((name for name, tensor in tensors.items() if not _can_be_shared(tensor)), None)
    hosts = all_gather_object((host_identity(), layout, wrong), "share_on_host")
    _check(hosts)
    leader = [host for host, _, _ in hosts].index(host_identity())
    segment, error = _segment_with(tensors, layout, total) if process_index() == leader else (None, None)
    try:
        offers = all_gather_object((os.getpid(), segment and _file_of(segment), error), "share_on_host")
        _raise_first(offers)
        pid, file, _ = offers[leader]
        assert file is not None
        shared, error = _views(pid, file, layout, total)
        _raise_first(all_gather_object((pid, None, error), "share_on_host"))  # the file is open until all have it
    finally:
        del segment
    return shared


def _can_be_shared(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta"


def _layout_of(tensors: Mapping[str, Tensor]) -> tuple[_Layout, int]:
    layout: _Layout = []
    end = 0
    for name, tensor in tensors.items():
        layout.append((name, tensor.dtype, tuple(tensor.shape), end))
        end += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    return layout, end


def _check(hosts: list[tuple[str, _Layout, str | None]]) -> None:
    """Raises ``InvalidArgument`` on all processes if one of them has something that cannot be shared."""
    for rank, (_, layout, wrong) in enumerate(hosts):
        if wrong is not None:
            raise InvalidArgument(
                f"share_on_host: {wrong!r} of process {rank} is no dense tensor with values; load a checkpoint before"
            )
        differing = [ours for ours, theirs in zip(hosts[0][1], layout, strict=False) if ours[:3] != theirs[:3]]
        if differing or len(layout) != len(hosts[0][1]):
            first = repr(differing[0][0]) if differing else "the number of tensors"
            raise InvalidArgument(
                f"share_on_host: processes 0 and {rank} have different weights, first {first}; all must pass weights "
                "of the same names, shapes and dtypes, in the same order"
            )


def _segment_with(
    tensors: Mapping[str, Tensor], layout: _Layout, total: int
) -> tuple[_native.Segment | None, OSError | None]:
    """Shared memory with the tensors, or why there is none."""
    try:
        segment = _native.create_segment(total)
    except SystemFailure as error:
        return None, error
    memory = torch.frombuffer(segment, dtype=torch.uint8)
    for (_, _, _, begin), tensor in zip(layout, tensors.values(), strict=True):
        _part(memory, begin, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    return segment, None


def _file_of(segment: _native.Segment) -> _File:
    status = os.fstat(segment.descriptor)
    return segment.descriptor, status.st_dev, status.st_ino


def _raise_first(offers: list[tuple[int, _File | None, OSError | None]]) -> None:
    for rank, (_, _, error) in enumerate(offers):
        if error is not None:
            raise SystemFailure(
                error.errno,
                f"share_on_host: process {rank} got no memory that its host shares ({error}); offload a part of the "
                "weights to the disk, or let the processes of a host see each other in /proc",
            )


def _views(pid: int, file: _File, layout: _Layout, total: int) -> tuple[dict[str, Tensor], OSError | None]:
    """The tensors in a file of process ``pid``, or why there are none."""
    path = f"/proc/{pid}/fd/{file[0]}"
    try:
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != file[1:]:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    except OSError as error:
        return {}, error
    empty = torch.empty(0, dtype=torch.uint8)
    memory = torch.from_file(path, shared=False, size=total, dtype=torch.uint8) if total else empty
    return {name: _part(memory, begin, dtype, shape) for name, dtype, shape, begin in layout}, None


def _part(memory: Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    empty: Any = torch.empty(shape, dtype=dtype, device="meta")
    return memory[begin : begin + empty.nbytes].view(dtype).reshape(shape)
