"""How a batch is divided into the parts that pass through the stages: of equal shape, as ranks agree on it beforehand.

The last row of a part that has fewer rows than others is repeated. The outputs for repeated rows are cut off before the
loss is computed, so they have no gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Batch

__all__ = ["MicroBatches"]


class MicroBatches:
    """A batch in ``count`` parts.

    Attributes:
        args: what the first stage gets, all parts together, with equally many rows for each of them.
        kwargs: what all stages get, likewise; what is no tensor is the same for all parts.
        rows: for each part how many of its rows are rows of the batch, the first ones. Fewer rows than parts leave
            some parts with none.
        size: the rows of a part.

    Raises:
        InvalidArgument: tensors differ in their numbers of rows, or have none.
    """

    def __init__(self, batch: Batch, count: int, device: torch.device) -> None:
        total = _rows(batch.args)
        bounds = [part * total // count for part in range(count + 1)]
        self.rows = [end - begin for begin, end in pairwise(bounds)]
        self.size = max(self.rows)
        self._device = device
        self._targets, self._bounds, self._total = batch.targets, bounds, total
        order: Tensor | None = None
        if total % count:
            places = [
                min(begin + place, max(end, 1) - 1) for begin, end in pairwise(bounds) for place in range(self.size)
            ]
            order = torch.tensor(places, device=device)

        def divided(name: str, value: Tensor) -> Tensor:
            value = value.detach().to(device)
            if value.ndim and value.shape[0] == 1 and total > 1:
                value = value.expand(total, *value.shape[1:])
            if not value.ndim or value.shape[0] != total:
                raise InvalidArgument(
                    f"pipeline: {name} has shape {list(value.shape)}, but the batch has {total} rows; expected a row "
                    "for each of them, or one for all"
                )
            return value if order is None else value.index_select(0, order)

        self.args = tuple(divided("an input", value) for value in batch.args)
        self.kwargs = {
            name: divided(name, value) if isinstance(value, Tensor) else value for name, value in batch.kwargs.items()
        }

    @property
    def count(self) -> int:
        return len(self.rows)

    def part(self, number: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """What a stage gets with one part."""
        span = slice(number * self.size, (number + 1) * self.size)
        named: Mapping[str, Any] = self.kwargs
        return (
            tuple(value[span] for value in self.args),
            {name: value[span] if isinstance(value, Tensor) else value for name, value in named.items()},
        )

    def targets(self, number: int) -> Any:
        """The rows of one part in each tensor of the targets that has the rows of the batch."""
        begin, end = self._bounds[number : number + 2]

        def one(value: Tensor) -> Tensor:
            value = value.to(self._device)
            return value[begin:end] if value.ndim and value.shape[0] == self._total else value

        return tree_map_only(Tensor, one, self._targets)


def _rows(args: tuple[Tensor, ...]) -> int:
    sizes = [value.shape[0] if value.ndim else 0 for value in args]
    if len(set(sizes)) != 1 or sizes[0] == 0:
        raise InvalidArgument(
            f"pipeline: inputs have shapes {[list(value.shape) for value in args]}; expected tensors with equally many "
            "rows, at least one"
        )
    return sizes[0]
