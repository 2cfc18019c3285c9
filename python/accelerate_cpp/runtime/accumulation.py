"""Gradient accumulation: where an ``Accelerator`` stands between two optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime.reading import Reading


class Accumulation:
    """Decides for each micro-batch whether gradients are synchronised and the optimizer steps.

    Each ``Accelerator`` has one. ``step`` counts its micro-batches since the last forced synchronisation.

    Args:
        reading: the loaders that the process is reading, of all Accelerators.
    """

    def __init__(
        self,
        num_steps: int = 1,
        adjust_scheduler: bool = False,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        reading: Reading | None = None,
    ) -> None:
        self.num_steps = num_steps
        self.adjust_scheduler = adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.step = 0
        self.sync_gradients = True
        self.reading = Reading() if reading is None else reading
        self._weights: list[float | None] = []
        self._averaged_by_weight = False

    def weigh(self, weight: float | None, cleared: Callable[[], bool]) -> float | None:
        """Takes the weight of one backward pass.

        Args:
            weight: ``None`` for a loss that is a mean.
            cleared: whether no gradient is left of the last step.

        Returns:
            What the gradients of the step weigh, if this pass completes it and has a weight.

        Raises:
            InvalidArgument: some passes of the step have a weight and some have none; or the gradients of this step
                have been divided by their weights already.
        """
        if self._averaged_by_weight and not cleared():
            raise InvalidArgument(
                "a second backward pass after gradients were divided by their weights, which could not be added to "
                "them; step and zero the gradients first, or put all passes of a step into accumulate()"
            )
        self._averaged_by_weight = False
        if weight is not None and not 0.0 <= weight < math.inf:
            raise InvalidArgument(f"weight={weight}: expected a finite number that is not negative")
        if self._weights and (self._weights[0] is None) != (weight is None):
            self._weights.clear()
            raise InvalidArgument(
                "some backward passes of this step have a weight and some have none; pass backward(loss, weight=...) "
                "in all of them, or in none"
            )
        self._weights.append(weight)
        if not self.sync_gradients:
            return None
        weights, self._weights = self._weights, []
        self._averaged_by_weight = weight is not None
        return sum(one for one in weights if one is not None) if weight is not None else None

    def end_step(self) -> None:
        """The optimizer has stepped, or gradients were cleared."""
        self._averaged_by_weight = False

    def advance(self) -> bool:
        """Counts one micro-batch and returns whether gradients are synchronised in it."""
        if self.sync_with_dataloader and self.reading.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0
        return self.sync_gradients

    def __deepcopy__(self, memo: object) -> Accumulation:
        return self  # a copy of what an ``Accelerator`` prepared belongs to it, too
