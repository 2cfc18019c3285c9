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
from accelerate_cpp.parallel.pipeline.shapes import Passed, described

__all__ = ["MicroBatches"]


class MicroBatches:
    """A batch in ``count`` parts.

    Args:
        size: the rows of a part; by default as few as suffice.
        elsewhere: the shapes and dtypes of the inputs of the first stage, on ranks that do not have them: their
            ``batch`` has none.

    Attributes:
        args: what the first stage gets, all parts together, with equally many rows for each of them.
        kwargs: what all stages get, likewise; what is no tensor is the same for all parts.
        rows: for each part how many of its rows are rows of the batch, the first ones. Fewer rows than parts leave
            some parts with none.
        size: the rows of a part.
        inputs: the shapes and dtypes of what the first stage gets with one part.

    Raises:
        InvalidArgument: tensors differ in their numbers of rows, or have none.
    """

    def __init__(
        self,
        batch: Batch,
        count: int,
        device: torch.device,
        size: int | None = None,
        elsewhere: Passed | None = None,
    ) -> None:
        whole = described(batch.args) if elsewhere is None else elsewhere
        total = _rows(whole)
        bounds = [part * total // count if size is None else min(part * size, total) for part in range(count + 1)]
        self.rows = [end - begin for begin, end in pairwise(bounds)]
        self.size = max(self.rows) if size is None else size
        self.inputs: Passed = tuple(((self.size, *shape[1:]), dtype) for shape, dtype in whole)
        self._device = device
        self._targets, self._bounds, self._total = batch.targets, bounds, total
        order: Tensor | None = None
        if min(self.rows) < self.size:
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

    def without_repeated(self, outputs: Any, number: int) -> Any:
        """``outputs`` for one part without those for rows that were repeated; tensors that have no rows as they are."""
        size, rows = self.size, self.rows[number]
        if rows == size:
            return outputs

        def one(tensor: Tensor) -> Tensor:
            return tensor[:rows] if tensor.ndim and tensor.shape[0] == size else tensor

        return tree_map_only(Tensor, one, outputs)

    def targets(self, number: int) -> Any:
        """The rows of one part in each tensor of the targets that has the rows of the batch."""
        begin, end = self._bounds[number : number + 2]

        def one(value: Tensor) -> Tensor:
            value = value.to(self._device)
            return value[begin:end] if value.ndim and value.shape[0] == self._total else value

        return tree_map_only(Tensor, one, self._targets)


def _rows(inputs: Passed) -> int:
    sizes = [shape[0] if shape else 0 for shape, _ in inputs]
    if len(set(sizes)) != 1 or sizes[0] == 0:
        raise InvalidArgument(
            f"pipeline: inputs have shapes {[list(shape) for shape, _ in inputs]}; expected tensors with equally many "
            "rows, at least one"
        )
    return sizes[0]
