"""Attention over split sequences in which queries stay where they are, and keys and values come to them.

Processes have tokens in zig-zag order (``sequences``). Then what a process's queries see of another process's keys is
all queries and all keys, all queries and the earlier half of the keys, or the later half of the queries and all keys;
so each pair of processes is one call of a kernel, and all of them do the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from accelerate_cpp.parallel.context.blocks import Combined, accumulating_dtype, block_attention, block_gradients
from accelerate_cpp.parallel.context.transports import Transport

__all__ = ["Visible", "split_attention", "visible"]


@dataclass(frozen=True)
class Visible:
    """What the queries of one process see of the keys of one: those from ``first_query`` on the first ``keys``.

    Attributes:
        causal: of those, query i sees the keys up to i.
    """

    first_query: int
    keys: int
    causal: bool


def visible(rank: int, source: int, tokens: int, *, causal: bool) -> Visible:
    """What the queries of process ``rank`` see of the keys of ``source``; each has ``tokens``, in zig-zag order."""
    if not causal:
        return Visible(0, tokens, False)
    if source == rank:
        return Visible(0, tokens, True)
    if source < rank:
        return Visible(0, tokens // 2, False)
    return Visible(tokens // 2, tokens, False)


def split_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    make_transport: Callable[[dist.ProcessGroup], Transport],
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """Attention of this process's queries to the keys of all processes of ``group``, differentiable once.

    Sums are in float32 or float64, on the way between processes as well. For the backward pass only this process's
    tokens are kept; keys and values are transported again.

    Args:
        query, key, value: (batch, heads, tokens here, head_dim), keys and values of heads that divide those of queries.
    """
    output: torch.Tensor = _apply(query, key, value, group, make_transport, causal, scale)
    return output


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: dist.ProcessGroup,
        make_transport: Callable[[dist.ProcessGroup], Transport],
        causal: bool,
        scale: float,
    ) -> torch.Tensor:
        rank, tokens = dist.get_rank(group), query.shape[-2]
        combined: Combined | None = None
        with torch.autocast(query.device.type, enabled=False):
            for source, there in make_transport(group).each(_joined(key, value)):
                seen = visible(rank, source, tokens, causal=causal)
                queries = query[..., seen.first_query :, :]
                keys, values = (part[..., : seen.keys, :] for part in _parted(there, key, value))
                block = block_attention(queries, keys, values, causal=seen.causal, scale=scale)
                if combined is None:
                    combined = Combined(*block)
                else:
                    combined.add(*block, first=seen.first_query)
        assert combined is not None
        output = combined.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, combined.logarithms)
        ctx.group, ctx.make_transport, ctx.causal, ctx.scale = group, make_transport, causal, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, logarithms = ctx.saved_tensors
        rank, tokens = dist.get_rank(ctx.group), query.shape[-2]
        dtype = accumulating_dtype(query.dtype)
        of_query = torch.zeros_like(query, dtype=dtype)
        transport = ctx.make_transport(ctx.group)
        with torch.autocast(query.device.type, enabled=False):
            for source, there in transport.each(_joined(key, value)):
                seen = visible(rank, source, tokens, causal=ctx.causal)
                queries = (..., slice(seen.first_query, None), slice(None))
                keys, values = (part[..., : seen.keys, :] for part in _parted(there, key, value))
                gradients = block_gradients(
                    output_gradient[queries],
                    query[queries],
                    keys,
                    values,
                    output[queries],
                    logarithms[..., seen.first_query :],
                    causal=seen.causal,
                    scale=ctx.scale,
                )
                of_query[queries] += gradients[0]
                sums = torch.zeros(there.numel(), dtype=dtype, device=there.device)
                for part, gradient in zip(_parted(sums, key, value), gradients[1:], strict=True):
                    part[..., : seen.keys, :] = gradient
                transport.add(sums)
        of_key, of_value = _parted(transport.sum(), key, value)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None, None, None


_apply: Callable[..., Any] = _SplitAttention.apply


def _joined(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Both as one tensor of one dimension, so that they travel in one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _parted(joined: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The two views of ``joined``, of the shapes of ``key`` and ``value``."""
    yield joined[: key.numel()].view(key.shape)
    yield joined[key.numel() :].view(value.shape)
