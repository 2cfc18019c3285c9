"""``scaled_dot_product_attention`` over sequences whose tokens are split over the processes of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.context.interception import torchs_attention
from accelerate_cpp.parallel.context.split_attention import split_attention
from accelerate_cpp.parallel.context.transports import Gathering, Ring, Transport
from accelerate_cpp.parallel.context.ulysses import ulysses_attention

__all__ = ["STRATEGIES", "attention", "zigzag"]

ULYSSES = "ulysses"
_TRANSPORTS: Mapping[str, Callable[[dist.ProcessGroup], Transport]] = {"allgather": Gathering, "alltoall": Ring}
STRATEGIES = (*_TRANSPORTS, ULYSSES)


def zigzag(strategy: str) -> bool:
    """Whether ``strategy`` wants tokens in zig-zag order, and not consecutive ones.

    Raises:
        InvalidArgument: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise InvalidArgument(
            f"context parallelism has no strategy {strategy!r}; use one of {', '.join(map(repr, STRATEGIES))}"
        )
    return strategy != ULYSSES


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: dist.ProcessGroup,
    strategy: str,
) -> torch.Tensor:
    """As ``torch.nn.functional.scaled_dot_product_attention``, over the tokens of all processes of ``group``.

    All of them call it, each with its tokens: in zig-zag order or consecutive ones, as :func:`zigzag` says. Results are
    those of one process that has all tokens, up to rounding, and so are gradients of ``query``, ``key`` and ``value``
    if the loss is the sum of the losses of all processes.

    Args:
        query, key, value: (batch, heads, tokens here, head_dim), or without batch; of one floating-point dtype, on any
            device of which ``group`` has a backend. Values can have another head_dim.
        attn_mask: must be ``None`` if there are several processes.
        dropout_p: must be 0 then, except in strategy ``"ulysses"``.
        is_causal: each token sees itself and the earlier ones of the whole sequence.
        scale: of the products of queries and keys; 1/sqrt(head_dim) if ``None``.
        enable_gqa: keys and values may have fewer heads, which consecutive heads of queries share.
        strategy: ``"allgather"``: keys and values are gathered. ``"alltoall"``: they go around a ring
            (arXiv:2310.01889). ``"ulysses"``: heads are exchanged against tokens (arXiv:2309.14509).

    Returns:
        (batch, heads, tokens here, head_dim of the values), of the dtype of ``query``.

    Raises:
        InvalidArgument: a mask, dropout, tensors that do not fit each other, attention to other tokens than those of
            the queries (cross-attention, cached keys), or heads that cannot be shared out.
    """
    query, key, value = _autocast(query, key, value)
    if dist.get_world_size(group) == 1:
        return torchs_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None:
        raise InvalidArgument(
            "context parallelism cannot apply attn_mask, whose keys are on other processes: use is_causal=True for "
            "causal attention, or no mask, and no padding tokens other than at the end of causal sequences"
        )
    if dropout_p > 0.0 and strategy != ULYSSES:
        raise InvalidArgument(
            f"context parallelism with strategy {strategy!r} cannot drop attention weights (dropout_p={dropout_p}), "
            "because each process computes only a part of a softmax at a time; set the dropout of attention to 0, or "
            "use strategy 'ulysses'"
        )
    if query.dim() == 3 and key.dim() == 3 and value.dim() == 3:
        unbatched = attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            None,
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            group=group,
            strategy=strategy,
        )
        return unbatched.squeeze(0)
    _require_fitting(query, key, value, enable_gqa)
    if not zigzag(strategy):
        return ulysses_attention(query, key, value, group, causal=is_causal, scale=scale, dropout_p=dropout_p)
    if is_causal and query.shape[-2] % 2 != 0:
        raise InvalidArgument(
            f"causal attention with strategy {strategy!r} of context parallelism needs an early and a late half of "
            f"each sequence on each process, but has {query.shape[-2]} tokens here; pad sequences to a multiple of "
            f"{2 * dist.get_world_size(group)} tokens, and split them by ContextParallel.split"
        )
    return split_attention(
        query,
        key,
        value,
        group,
        _TRANSPORTS[strategy],
        causal=is_causal,
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None else scale,
    )


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``tensors`` as torch's own attention gets them under autocast."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        each.to(dtype) if each.is_floating_point() and each.dtype != torch.float64 else each for each in tensors
    )


def _require_fitting(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    kinds = {type(query), type(key), type(value)}
    if not kinds <= {torch.Tensor, torch.nn.Parameter}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidArgument(
            f"context parallelism needs query, key and value as plain tensors, but got {names}; pass the parts of "
            "distributed tensors by their to_local()"
        )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.dim() == key.dim() == value.dim() == 4:
        raise InvalidArgument(
            "context parallelism needs query, key and value of shape (batch, heads, tokens, head_dim), but got "
            f"{shapes}; reshape them"
        )
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise InvalidArgument(
            "context parallelism needs query, key and value of one floating-point dtype, but got "
            f"{query.dtype}, {key.dtype} and {value.dtype}; convert them"
        )
    if not query.shape[-2] == key.shape[-2] == value.shape[-2]:
        raise InvalidArgument(
            "context parallelism can only compute attention of a sequence to itself, but there are "
            f"{query.shape[-2]} queries, {key.shape[-2]} keys and {value.shape[-2]} values here ({shapes}): "
            "cross-attention and cached keys are not supported; call such a model outside of context parallelism, or "
            "with use_cache=False"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    shared = heads % kv_heads == 0 if enable_gqa and kv_heads > 0 else heads == kv_heads
    if not shared or value.shape[1] != kv_heads or not query.shape[0] == key.shape[0] == value.shape[0]:
        raise InvalidArgument(
            "context parallelism needs query, key and value of one batch size and number of heads, or with "
            f"enable_gqa=True fewer heads of keys and values that divide those of queries, but got {shapes} and "
            f"enable_gqa={enable_gqa}; expand them"
        )
    if query.shape[-1] != key.shape[-1]:
        raise InvalidArgument(f"queries and keys need one head_dim, but got {shapes}")
