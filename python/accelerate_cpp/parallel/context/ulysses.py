"""Attention over split sequences in which each process computes some heads, for all tokens.

Before attention, processes exchange heads against tokens, and after it tokens against heads (Jacobs et al. 2023,
DeepSpeed Ulysses, arXiv:2309.14509). Processes have consecutive tokens, in rank order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.context.interception import torchs_attention

__all__ = ["heads_to_tokens", "tokens_to_heads", "ulysses_attention"]


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    causal: bool,
    scale: float | None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attention of this process's queries to the keys of all processes of ``group``.

    Heads of keys and values that several processes need are repeated, so that the group can have more processes than
    these heads.

    Args:
        query, key, value: (batch, heads, tokens here, head_dim), keys and values of heads that divide those of queries.
        dropout_p: the probability with which a weight is dropped; processes should have different random states.

    Raises:
        InvalidArgument: the processes of the group do not divide the heads of the queries.
    """
    size = dist.get_world_size(group)
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % size != 0:
        raise InvalidArgument(
            f"context parallelism with strategy 'ulysses' gives each of {size} processes as many heads as the others, "
            f"but attention has {heads} heads; use a number of processes that divides {heads}, or strategy 'alltoall' "
            "or 'allgather'"
        )
    repeats = size // math.gcd(size, kv_heads)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    query, key, value = (heads_to_tokens(each, group) for each in (query, key, value))
    output = torchs_attention(
        query, key, value, None, dropout_p, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return tokens_to_heads(output, group)


def heads_to_tokens(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From all heads of this process's tokens to this process's heads of all tokens.

    (batch, heads, tokens, dim) becomes (batch, heads / size, tokens * size, dim); differentiable.
    """
    result: torch.Tensor = _apply_heads_to_tokens(tensor, group)
    return result


def tokens_to_heads(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The inverse of :func:`heads_to_tokens`; differentiable."""
    result: torch.Tensor = _apply_tokens_to_heads(tensor, group)
    return result


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        by_owner_of_heads = tensor.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1)
        by_owner_of_tokens = _exchanged(by_owner_of_heads, group)
        return by_owner_of_tokens.permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tokens_to_heads(gradient, ctx.group), None


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        by_owner_of_tokens = tensor.unflatten(2, (dist.get_world_size(group), -1)).permute(2, 0, 1, 3, 4)
        by_owner_of_heads = _exchanged(by_owner_of_tokens, group)
        return by_owner_of_heads.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return heads_to_tokens(gradient, ctx.group), None


_apply_heads_to_tokens: Callable[..., Any] = _HeadsToTokens.apply
_apply_tokens_to_heads: Callable[..., Any] = _TokensToHeads.apply


def _exchanged(rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Row r goes to process r, and what process r sent becomes row r."""
    rows = rows.contiguous()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received
