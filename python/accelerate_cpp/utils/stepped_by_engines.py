"""Optimizers and schedules that an engine steps, so that what programs call does nothing."""

from __future__ import annotations

from typing import Any

from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.scheduler import AcceleratedScheduler

__all__ = ["OptimizerOfEngine", "ScheduleOfEngine"]


class OptimizerOfEngine(AcceleratedOptimizer):
    """An optimizer that an engine steps: ``step`` and ``zero_grad`` do nothing."""

    _skipped_attribute: str
    """Where the engine notes whether it skipped the last step."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does nothing: the engine clears gradients."""

    def step(self, closure: Any = None) -> Any:
        """Does nothing: the engine steps."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        return bool(getattr(self.optimizer, self._skipped_attribute, False))


class ScheduleOfEngine(AcceleratedScheduler):
    """A schedule that an engine steps: ``step`` does nothing."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the engine steps."""
