"""What tensors pass through between the parts of split layers: functions of autograd over the processes of a group.

Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism"
(arXiv:1909.08053), and Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198). Each has a counterpart that is its backward pass.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.devices.shards import is_sharded_tensor


def _parts(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    return [part.contiguous() for part in tensor.chunk(group.size(), dim)]


def _gather(part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim)


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed


def _sum_of_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    parts = _parts(tensor, dim, group)
    summed = torch.empty_like(parts[group.rank()])
    dist.reduce_scatter(summed, parts, group=group)
    return summed


class _Part(torch.autograd.Function):
    """``DTensor.to_local``, whose backward pass compares layouts and passes through two more functions of autograd."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        ctx.like = parameter._spec
        part: torch.Tensor = parameter._local_tensor
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor(gradients[0].contiguous(), copy.copy(ctx.like), requires_grad=False)


def part_of(parameter: Any) -> Any:
    """What this process has of a parameter that is laid out over processes; others, and ``None``, as they are."""
    return _Part.apply(parameter) if is_sharded_tensor(parameter) else parameter  # type: ignore[no-untyped-call]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup, adds: bool) -> torch.Tensor:
        ctx.dim, ctx.group, ctx.adds = dim, group, adds
        return _gather(part, dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        if ctx.adds:
            return _sum_of_part(gradients[0], ctx.dim, ctx.group), None, None, None
        return _parts(gradients[0], ctx.dim, ctx.group)[ctx.group.rank()], None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, adds: bool) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _sum_of_part(tensor, dim, group) if adds else _parts(tensor, dim, group)[group.rank()]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, None, None, None]:
        return _gather(gradients[0], ctx.dim, ctx.group), None, None, None


def with_summed_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``tensor``, equal on all processes, each of which uses it for a part: its gradient is the sum of theirs."""
    return _SumGradients.apply(tensor, group)  # type: ignore[no-untyped-call,no-any-return]


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over all processes, which go on with it alike."""
    return _Sum.apply(tensor, group)  # type: ignore[no-untyped-call,no-any-return]


def gathered(part: torch.Tensor, dim: int, group: dist.ProcessGroup, adds_gradients: bool = False) -> torch.Tensor:
    """The parts of all processes, joined along ``dim``.

    Args:
        adds_gradients: whether each process goes on with the whole for a part of the work, so that gradients are added
            up; otherwise they are equal.
    """
    return _Gather.apply(part, dim, group, adds_gradients)  # type: ignore[no-untyped-call,no-any-return]


def own_part(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup, adds: bool = False) -> torch.Tensor:
    """The part of this process along ``dim``, of ``tensor`` or if it ``adds`` of the sum over all processes."""
    return _Cut.apply(tensor, dim, group, adds)  # type: ignore[no-untyped-call,no-any-return]


class SharedInput:
    """:func:`with_summed_gradients`, once for layers that get the same tensor one after the other.

    Queries, keys and values are computed from one tensor; its gradients are then added up before they are exchanged.
    What was made of a tensor is kept as long as the program keeps that.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[weakref.ref[torch.Tensor], torch.Tensor, int] | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._last is not None:
            given, made, version = self._last
            if given() is tensor and version == tensor._version:
                return made
        fresh = with_summed_gradients(tensor, self._group)
        self._last = weakref.ref(tensor, self._forget), fresh, tensor._version
        return fresh

    def _forget(self, gone: weakref.ref[torch.Tensor]) -> None:
        if self._last is not None and self._last[0] is gone:
            self._last = None
