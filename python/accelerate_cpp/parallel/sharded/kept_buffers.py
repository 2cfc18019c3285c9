"""Buffers of collectives that are kept from one unit to the next: mapping new shared memory takes longer than using it.

``fully_shard`` asks for memory for each gathered unit and each reduced gradient, and lets go of it soon. Here it gets
shared memory, in which collectives of the processes of a host work in place, of a size that was used before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from accelerate_cpp._native import shared_empty
from accelerate_cpp.comm.single_tensors import all_gather_single, reduce_scatter_single


class KeptBuffers:
    """Shared memory of one model, by size and dtype; as much as was ever in use at once, freed with the model."""

    def __init__(self) -> None:
        self._by_size: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def take(self, size: Sequence[int | torch.SymInt], dtype: torch.dtype) -> torch.Tensor:
        """A one-dimensional tensor of ``size`` elements that nobody else has, uninitialised."""
        number = math.prod(int(length) for length in size)
        buffers = self._by_size.setdefault((number, dtype), [])
        for buffer in buffers:
            if holders_of(buffer) == _ONLY_HERE:
                return buffer.detach()
        buffers.append(shared_empty([number], dtype))
        return buffers[-1].detach()


def holders_of(tensor: torch.Tensor) -> int:
    """How many hold the memory of ``tensor``: tensors that are views of it, autograd, and this call."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ONLY_HERE = holders_of(torch.empty(1))


class GatherIntoKept(AllGather):
    """The all-gather of ``fully_shard`` into a kept buffer."""

    def __init__(self, buffers: KeptBuffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._buffers.take(size, dtype)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class ScatterFromKept(ReduceScatter):
    """The reduce-scatter of ``fully_shard`` from a kept buffer, into one where the optimizer has used the gradient."""

    def __init__(self, buffers: KeptBuffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._buffers.take(size, dtype)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        work: dist.Work | None = reduce_scatter_single(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def keep_buffers(units: Sequence[Any], group: dist.ProcessGroup) -> bool:
    """Lets the collectives of ``units``, which share the processes of ``group``, use kept buffers.

    Returns:
        Whether it did; not on accelerators, nor over other backends than ours.
    """
    if "cpu:shm" not in str(dist.get_backend_config(group)).split(","):
        return False
    buffers = KeptBuffers()
    for unit in units:
        unit.set_custom_all_gather(GatherIntoKept(buffers))
        unit.set_custom_reduce_scatter(ScatterFromKept(buffers))
    return True
