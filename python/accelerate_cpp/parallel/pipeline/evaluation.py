"""Forward passes alone through the stages of a pipeline, in one order for all schedules.

Stage s computes part i at time s + i. What it needs was sent at an earlier time, and between two ranks messages arrive
in the order in which they were sent, whichever stages the ranks have; so no rank waits in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate_cpp.parallel.pipeline.micro_batches import MicroBatches
from accelerate_cpp.parallel.pipeline.peers import global_rank
from accelerate_cpp.parallel.pipeline.shapes import Passed, passed_between, with_rows_of

__all__ = ["KnownShapes", "evaluate", "form_of"]


class KnownShapes:
    """What stages return, which is found out once for each form of batches.

    Args:
        stages: those of this rank by their number.
        ranks: for each stage its rank in the group.
        follow_inputs: whether what stages return has the first two dimensions of the inputs, and otherwise always the
            same shape and dtype.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        follow_inputs: bool,
    ) -> None:
        self._stages, self._ranks, self._group, self._follow_inputs = stages, ranks, group, follow_inputs
        self._known: dict[Any, list[Passed]] = {}

    def of(self, parts: MicroBatches, device: torch.device) -> list[Passed]:
        """For a part, what each stage returns. Called by all ranks of the group.

        Raises:
            InvalidArgument: on all ranks, if a stage returns something that cannot be sent; the rank of a stage that
                raises has what it raises.
        """
        key: Any = form_of(parts, device)
        if self._follow_inputs:
            key = key[0], tuple(parts.kwargs)
        if key not in self._known:
            args, named = parts.part(0)
            self._known[key] = passed_between(self._stages, self._ranks, self._group, device, args, named)
        elif self._follow_inputs:
            return [with_rows_of(one, parts.inputs) for one in self._known[key]]
        return self._known[key]


def form_of(parts: MicroBatches, device: torch.device) -> tuple[Any, Any, Any]:
    """What decides about the shapes and dtypes that stages pass on: autocast, inputs, and what is given by name."""
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    shapes = tuple(
        (name, (parts.size, *value.shape[1:]) if isinstance(value, Tensor) else type(value))
        for name, value in parts.kwargs.items()
    )
    return cast, parts.inputs, shapes


def evaluate(
    stages: Mapping[int, nn.Module],
    ranks: Sequence[int],
    passed: Sequence[Passed],
    group: dist.ProcessGroup | None,
    device: torch.device,
    parts: MicroBatches,
    last: Callable[[Any, int], Any],
) -> None:
    """Called by all ranks of the group.

    Args:
        stages: those of this rank by their number.
        ranks: for each stage its rank in the group.
        passed: what each stage returns for a part.
        last: gets the outputs of the last stage for each part, and the number of the part.
    """
    here = dist.get_rank(group)
    kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # for the next stage, if it is here, too
    sent: list[tuple[Any, Tensor]] = []  # not to be freed or changed before it is sent
    for _, number, part in sorted((number + part, number, part) for number in stages for part in range(parts.count)):
        args, named = parts.part(part)
        if number > 0 and ranks[number - 1] == here:
            args = kept.pop((number - 1, part))
        elif number > 0:
            args = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in passed[number - 1])
            for tensor in args:
                dist.recv(tensor, global_rank(ranks[number - 1], group), group)
        outputs = stages[number](*args, **named)
        tensors = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        if number == len(ranks) - 1:
            last(outputs, part)
        elif ranks[number + 1] == here:
            kept[number, part] = tensors
        else:
            for tensor in tensors:
                sent.append((dist.isend(tensor, global_rank(ranks[number + 1], group), group), tensor))
    for work, _ in sent:
        work.wait()
