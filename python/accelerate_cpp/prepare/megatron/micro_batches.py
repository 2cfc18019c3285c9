"""The micro-batches of a step, and what each of them contributes to its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.prepare.megatron.groups import DataGroup

__all__ = ["chunks_of", "rows_of", "shares_of"]


def rows_of(batch: Mapping[str, Any]) -> int:
    """The rows of the tensors in ``batch``.

    Raises:
        InvalidArgument: there is no tensor, or they have different numbers of rows.
    """
    found = {name: len(value) for name, value in batch.items() if isinstance(value, Tensor) and value.ndim}
    if len(set(found.values())) != 1 or 0 in found.values():
        raise InvalidArgument(
            f"MegatronEngine: a batch with {found or 'no tensor'}; expected tensors with equally many rows, by name"
        )
    return next(iter(found.values()))


def chunks_of(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """``batch`` in ``count`` parts of about as many rows, without those that would have none."""
    rows = rows_of(batch)
    bounds = [part * rows // count for part in range(count + 1)]
    return [
        {name: value[begin:end] if isinstance(value, Tensor) and value.ndim else value for name, value in batch.items()}
        for begin, end in pairwise(bounds)
        if begin < end
    ]


def shares_of(
    counted: Sequence[Tensor | None], rows: Sequence[int], data: DataGroup, sequences: Any, by_tokens: bool
) -> list[Tensor | float]:
    """What the means of micro-batches are multiplied with, so that their sums, averaged over processes, are the loss.

    Args:
        counted: how many tokens each mean is over; ``None`` if that is not known, then rows count.
        rows: of each micro-batch.
        data: the processes with other batches or tokens.
        sequences: the group of those with other tokens of the same batch; ``None`` if sequences are whole.
        by_tokens: whether all tokens of a step count equally, instead of all micro-batches.
    """
    known = [one for one in counted if one is not None]
    whole = sum(rows)
    if len(known) < len(counted):
        return [one / whole for one in rows]
    tokens = torch.stack([one.float() for one in known])
    if by_tokens:
        total = data.summed(tokens.sum())
        return list(tokens * (data.size / total.clamp(min=1)))
    if sequences is None:
        return [one / whole for one in rows]
    everywhere = tokens.clone()
    torch.distributed.all_reduce(everywhere, group=sequences)
    size = torch.distributed.get_world_size(sequences)
    return list(tokens * size / everywhere.clamp(min=1) * torch.tensor(rows, device=tokens.device) / whole)
