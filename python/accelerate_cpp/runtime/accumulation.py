"""Gradient accumulation: the position of an ``Accelerator`` between two optimizer steps."""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from accelerate_cpp.runtime.reading import Reading

if TYPE_CHECKING:
    import torch

    from accelerate_cpp.parallel.step_weights import StepWeights
    from accelerate_cpp.runtime.elastic import Elastic


class Accumulation:
    """Decides for each micro-batch whether gradients are synchronised and the optimizer steps.

    Each ``Accelerator`` has one. ``step`` counts its micro-batches since the last forced synchronisation.

    Args:
        reading: the loaders that the process is reading, of all Accelerators.

    Attributes:
        elastic: set in a run whose number of processes is not the one that ``num_steps`` was given for.
    """

    elastic: Elastic | None = None

    def __init__(
        self,
        num_steps: int = 1,
        adjust_scheduler: bool = False,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        reading: Reading | None = None,
    ) -> None:
        self._given_steps = num_steps
        self._counts = False
        self.adjust_scheduler = adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.step = 0
        self.sync_gradients = True
        self.reading = Reading() if reading is None else reading

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step.

        In an elastic run they are adjusted once it is known that the program leaves the counting to ``accumulate``.
        """
        if self.elastic is None or not self._counts:
            return self._given_steps
        return self.elastic.micro_batches(self._given_steps)

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._given_steps = num_steps

    @property
    def rate_factor(self) -> float:
        """By what the learning rate is multiplied in a step, because it has other than the usual number of samples."""
        return 1.0 if self.elastic is None else self.elastic.rate_factor(self._given_steps, self.num_steps)

    def schedule_advance(self, copies: int) -> int | Fraction:
        """By how many steps a schedule advances with ``copies`` processes that read different batches."""
        if self.elastic is None:
            return copies
        return self.elastic.schedule_advance(self._given_steps, self.num_steps, copies)

    @cached_property
    def weights(self) -> StepWeights:
        """The weights of its backward passes."""
        # It needs torch, which a process that starts workers does not load.
        from accelerate_cpp.parallel.step_weights import StepWeights

        return StepWeights()

    def weighted(self, loss: torch.Tensor, weight: float | torch.Tensor | None) -> tuple[torch.Tensor, float | None]:
        """The loss to differentiate and its weight; within ``join_uneven_inputs`` a mean is weighed by its samples.

        A batch that is only repeated, so that the others can train on, weighs nothing.
        """
        if self.reading.repeated:
            return loss * 0.0, 0.0
        if weight is not None:
            return loss, float(weight)
        if self.reading.share is not None:
            return loss * self.reading.share / self.num_steps, None
        own = self.reading.weight if self.reading.repeats else None
        if own is None:
            return loss / self.num_steps, None
        share = own / self.num_steps
        return loss * share, share

    def advance(self) -> bool:
        """Counts one micro-batch and returns whether gradients are synchronised in it."""
        self._counts = True
        if self.sync_with_dataloader and self.reading.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0
        return self.sync_gradients

    def __deepcopy__(self, memo: object) -> Accumulation:
        return self  # a copy of what an ``Accelerator`` prepared belongs to it, too
