"""One copy of weights for all processes of a host."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accelerate_cpp.comm.gather import all_gather_object
from accelerate_cpp.comm.hosts import host_identity
from accelerate_cpp.comm.topology import process_index, world_size
from accelerate_cpp.errors import InvalidArgument, SystemFailure

__all__ = ["share_on_host"]

_ALIGNMENT = 64
_FILE_NAME = "accelerate-cpp-weights"

# Of each tensor: name, dtype, shape, and where it begins.
_Layout = list[tuple[str, torch.dtype, tuple[int, ...], int]]


def share_on_host(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU with the values of ``state_dict``, of which the processes of a host have one copy together.

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
    if world_size() == 1 or not hasattr(os, "memfd_create"):
        return tensors
    layout, total = _layout_of(tensors)
    wrong = next((name for name, tensor in tensors.items() if not _can_be_shared(tensor)), None)
    hosts = all_gather_object((host_identity(), layout, wrong), "share_on_host")
    _check(hosts)
    leader = [host for host, _, _ in hosts].index(host_identity())
    file, error = _file_with(tensors, layout, total) if process_index() == leader else (None, None)
    try:
        offers = all_gather_object((os.getpid(), file, error), "share_on_host")
        _raise_first(offers)
        pid, number, _ = offers[leader]
        shared, error = _views(f"/proc/{pid}/fd/{number}", layout, total)
        _raise_first(all_gather_object((pid, None, error), "share_on_host"))  # the file is open until all have it
    finally:
        if file is not None:
            os.close(file)
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
    """Raises ``InvalidArgument`` on all processes if what one of them has cannot be shared."""
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


def _file_with(tensors: Mapping[str, Tensor], layout: _Layout, total: int) -> tuple[int | None, OSError | None]:
    """A memory file with the tensors, or why there is none."""
    file = os.memfd_create(_FILE_NAME)
    try:
        if total:
            os.posix_fallocate(file, 0, total)
        memory = _memory(f"/proc/self/fd/{file}", total, shared=True)
        for (_, _, _, begin), tensor in zip(layout, tensors.values(), strict=True):
            _part(memory, begin, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    except OSError as error:
        os.close(file)
        return None, error
    except BaseException:
        os.close(file)
        raise
    return file, None


def _raise_first(offers: list[tuple[int, int | None, OSError | None]]) -> None:
    for rank, (_, _, error) in enumerate(offers):
        if error is not None:
            raise SystemFailure(
                error.errno,
                f"share_on_host: process {rank} got no memory that its host shares ({error}); offload a part of the "
                "weights to the disk, or let the processes of a host see each other in /proc",
            )


def _views(path: str, layout: _Layout, total: int) -> tuple[dict[str, Tensor], OSError | None]:
    """The tensors in a file of another process, or why there are none."""
    try:
        if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    except OSError as error:
        return {}, error
    memory = _memory(path, total, shared=False)
    return {name: _part(memory, begin, dtype, shape) for name, dtype, shape, begin in layout}, None


def _memory(path: str, total: int, shared: bool) -> Tensor:
    if not total:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(path, shared=shared, size=total, dtype=torch.uint8)


def _part(memory: Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    empty: Any = torch.empty(shape, dtype=dtype, device="meta")
    return memory[begin : begin + empty.nbytes].view(dtype).reshape(shape)
