"""Attention of a block of queries to a block of keys, in such a form that blocks can be combined.

Softmax over keys that are in several blocks is computed from each block's output and the logarithm of its sum of
exponentials (Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889). Torch's fused kernel for
CPUs returns both; elsewhere they are computed by strips of queries, so that no memory of the size of a block squared is
needed.

Shapes: queries (batch, heads, queries, head_dim); keys (batch, kv_heads, keys, head_dim), where kv_heads divides heads
and consecutive heads share one of them; values (batch, kv_heads, keys, value_dim); logarithms (batch, heads, queries).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["Combined", "accumulating_dtype", "block_attention", "block_gradients"]

_STRIP = 512
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def accumulating_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over blocks of ``dtype``: float32, or float64 if that is more precise."""
    return torch.promote_types(dtype, torch.float32)


def block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one block, and the logarithms of the sums of exponentials.

    Args:
        causal: query i sees the keys up to i; there are as many keys as queries.

    Returns:
        The output, (batch, heads, queries, value_dim), of the queries' dtype or :func:`accumulating_dtype`, and the
        logarithms, of :func:`accumulating_dtype`.
    """
    if _has_kernel(query, key, value):
        output, logarithms = _flash(query, key, value, 0.0, causal, scale=scale)
        return output, logarithms
    outputs, all_logarithms = [], []
    for rows, keys in _strips(query.shape[-2], key.shape[-2], causal):
        scores = _scores(query[..., rows, :], key[..., keys, :], scale, rows.start if causal else None)
        logarithms = scores.logsumexp(-1)
        outputs.append(_per_head((scores - logarithms.unsqueeze(-1)).exp(), value[..., keys, :]))
        all_logarithms.append(logarithms)
    return torch.cat(outputs, -2), torch.cat(all_logarithms, -1)


def block_gradients(
    output_gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logarithms: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one block contributes to the gradients of its queries, keys and values.

    Args:
        output, logarithms: those over all blocks that the queries see, not of this one.
    """
    if _has_kernel(query, key, value):
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _flash_backward(
            output_gradient, query, key, value, output, logarithms, 0.0, causal, scale=scale
        )
        return gradients
    dtype = accumulating_dtype(query.dtype)
    output_gradient = output_gradient.to(dtype)
    of_scores_sum = (output_gradient * output.to(dtype)).sum(-1, keepdim=True)
    of_query = torch.zeros_like(query, dtype=dtype)
    of_key, of_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    for rows, keys in _strips(query.shape[-2], key.shape[-2], causal):
        of_output = output_gradient[..., rows, :]
        scores = _scores(query[..., rows, :], key[..., keys, :], scale, rows.start if causal else None)
        weights = (scores - logarithms[..., rows].unsqueeze(-1)).exp()
        of_weights = _per_head(of_output, value[..., keys, :].transpose(-1, -2))
        of_scores = weights * (of_weights - of_scores_sum[..., rows, :]) * scale
        of_query[..., rows, :] = _per_head(of_scores, key[..., keys, :])
        of_key[..., keys, :] += _per_kv_head(of_scores, query[..., rows, :], key.shape[1])
        of_value[..., keys, :] += _per_kv_head(weights, of_output, key.shape[1])
    return of_query, of_key, of_value


class Combined:
    """The output over all blocks that were added; the first one must be for all queries, and have a key for each."""

    def __init__(self, output: torch.Tensor, logarithms: torch.Tensor) -> None:
        dtype = accumulating_dtype(output.dtype)
        self.output = output.to(dtype)
        self.logarithms = logarithms

    def add(self, output: torch.Tensor, logarithms: torch.Tensor, first: int) -> None:
        """Adds a block for the queries from ``first`` on."""
        before, sum_before = self.output[..., first:, :], self.logarithms[..., first:]
        before.lerp_(output.to(before.dtype), torch.sigmoid(logarithms - sum_before).unsqueeze(-1))
        sum_before.copy_(torch.logaddexp(sum_before, logarithms))


def _has_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    # The kernel divides by the number of elements.
    return query.device.type == "cpu" and value.shape[-1] == query.shape[-1] and query.numel() > 0 and key.numel() > 0


def _strips(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Strips of queries, and the keys that they see."""
    for begin in range(0, max(queries, 1), _STRIP):
        end = min(begin + _STRIP, queries)
        yield slice(begin, end), slice(0, end if causal else keys)


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, first: int | None) -> torch.Tensor:
    """The scaled products of queries, of which the first has number ``first`` if attention is causal, and keys."""
    scores = _per_head(query, key.transpose(-1, -2)) * scale
    if first is None:
        return scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
    return scores.masked_fill(later, float("-inf"))


def _per_head(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of ``left``, a matrix per head, and ``right``, one for several consecutive heads."""
    dtype, kv_heads = accumulating_dtype(left.dtype), right.shape[1]
    grouped = left.to(dtype).unflatten(1, (kv_heads, left.shape[1] // kv_heads))
    product: torch.Tensor = grouped @ right.to(dtype).unsqueeze(2)
    return product.flatten(1, 2)


def _per_kv_head(left: torch.Tensor, right: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The product of the transposed ``left`` and ``right``, summed over the heads that share keys and values."""
    dtype = accumulating_dtype(left.dtype)
    product = left.to(dtype).transpose(-1, -2) @ right.to(dtype)
    grouped: torch.Tensor = product.unflatten(1, (kv_heads, left.shape[1] // kv_heads))
    return grouped.sum(2)
