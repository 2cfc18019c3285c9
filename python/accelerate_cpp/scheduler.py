"""The learning-rate scheduler that prepared training loops step."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.runtime.data_place import data_size
from accelerate_cpp.runtime.gradient_state import GradientState, GradientStateOf, accumulation_of

__getattr__ = lending("scheduler")

# Attributes that are set on the wrapper even if the wrapped scheduler has one of the same name.
_OWN = frozenset(
    {"scheduler", "optimizers", "split_batches", "step_with_optimizer", "_is_accelerate_prepared"} | {"_accumulation"}
)


class AcceleratedScheduler:
    """Wraps a scheduler so that it advances with the optimizer, and at the same pace as with one process.

    All other attributes are read from and set on the wrapped scheduler.

    Args:
        optimizers: one or several optimizers; the scheduler waits for all.
        step_with_optimizer: if false, each call of ``step`` is one step of the wrapped scheduler.
        split_batches: whether a global batch is one batch of the loader. If not, it is one per process, and the
            schedule advances by as many steps.
    """

    _due: int | Fraction = 0  # of a step of the schedule that an elastic run has not made whole yet

    def __init__(
        self, scheduler: Any, optimizers: Any, step_with_optimizer: bool = True, split_batches: bool = False
    ) -> None:
        self.scheduler = scheduler
        # A list as it is, since optimizers may be prepared, and added to it, later.
        self.optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN or hasattr(type(self), name) or "scheduler" not in self.__dict__
        if own or not hasattr(self.scheduler, name):
            super().__setattr__(name, value)
        else:
            setattr(self.scheduler, name, value)

    @property
    def gradient_state(self) -> GradientState:
        """The position of the run between two optimizer steps."""
        return GradientStateOf(accumulation_of(self))

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each parameter group, as the wrapped scheduler last set it."""
        rates: list[Any] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> list[Any]:
        """As in the wrapped scheduler."""
        rates: list[Any] = self.scheduler.get_lr()
        return rates

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """As in the wrapped scheduler."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """As in the wrapped scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances the schedule if the optimizers stepped; a schedule with ``total_steps`` stops at its end."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        accumulation = accumulation_of(self)
        if not accumulation.sync_gradients:
            if accumulation.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            return
        if self.split_batches:
            self.scheduler.step(*args, **kwargs)
            return
        self._due += accumulation.schedule_advance(data_size())
        steps = int(self._due)
        self._due -= steps
        for _ in range(steps):
            total_steps = getattr(self.scheduler, "total_steps", None)
            if total_steps is None or self.scheduler._step_count <= total_steps:
                self.scheduler.step(*args, **kwargs)
