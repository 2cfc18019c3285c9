"""What the last stage returns for the parts of a batch, joined again, and given to all ranks if that is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.peers import global_rank

__all__ = ["Outputs", "given_to_all"]


@dataclass(frozen=True)
class _Sent:
    """In place of a tensor, which follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Outputs:
    """The outputs of parts, in order."""

    def __init__(self) -> None:
        self._parts: list[Any] = []

    def keep(self, outputs: Any) -> None:
        """Those of the next part, detached."""
        self._parts.append(tree_map_only(Tensor, lambda tensor: tensor.detach(), outputs))

    def joined(self) -> Any:
        """Those of the batch: tensors have the rows of all parts; what is no tensor is that of the first part.

        Raises:
            InvalidArgument: there are several parts, and a tensor has no dimensions.
        """
        if len(self._parts) == 1:
            return self._parts[0]
        flat = [tree_flatten(outputs) for outputs in self._parts]
        leaves = [_joined(pieces) for pieces in zip(*(leaves for leaves, _ in flat), strict=True)]
        return tree_unflatten(leaves, flat[0][1])


def _joined(pieces: tuple[Any, ...]) -> Any:
    if not isinstance(pieces[0], Tensor):
        return pieces[0]
    if not pieces[0].ndim:
        raise InvalidArgument(
            f"pipeline: the last stage returns a tensor without dimensions for each of {len(pieces)} parts of a batch, "
            "which make up no output for the whole; expected one with a row for each row of the batch"
        )
    return torch.cat(pieces)


def given_to_all(outputs: Any, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> Any:
    """``outputs`` of one rank of the group, on all its ranks, which all call this.

    Args:
        outputs: tensors in structures; ``None`` on other ranks.
    """
    source, here = global_rank(rank, group), dist.get_rank(group) == rank
    leaves, structure = tree_flatten(outputs)
    said: list[Any] = [None, None]
    if here:
        said = [
            tree_unflatten(range(len(leaves)), structure),
            [_Sent(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        ]
    dist.broadcast_object_list(said, source, group)
    numbered, told = said
    if not here:
        leaves = [
            torch.empty(one.shape, dtype=one.dtype, device=device) if isinstance(one, _Sent) else one for one in told
        ]
    leaves = [leaf.contiguous() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            dist.broadcast(leaf, source, group)
    return tree_map(lambda number: leaves[number], numbered)
