"""The optimizer that prepared training loops step."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision.grad_scaler import note_cleared, overflowed, settle, settle_before_step, update_after_step
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.gradient_state import GradientStateOf, accumulation_of
from accelerate_cpp.state import AcceleratorState, GradientState

__getattr__ = lending("optimizer")

# Attributes that are set on the wrapper even if the wrapped optimizer has one of the same name.
_OWN = frozenset(
    {"optimizer", "scaler", "device_placement", "_is_overflow", "_accelerate_step_called", "_takes_set_to_none"}
    | {"_is_accelerate_prepared", "_accumulation"}
)


@contextmanager
def _rates_times(factor: float, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside this block the learning rates of ``optimizer`` are multiplied; schedules see their own values."""
    if factor == 1.0:
        yield
        return
    groups = [group for group in optimizer.param_groups if "lr" in group]
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer: ``step`` and ``zero_grad`` do nothing in micro-batches that only accumulate gradients.

    All other attributes are read from and set on the wrapped optimizer.

    Args:
        device_placement: move the optimizer's state to the device of its parameters.
        scaler: the scaler of the loss in fp16 training; it un-scales the gradients, and skips steps with gradients that
            are not finite.
    """

    _accelerate_step_called = False  # in the original, whether the scaler has stepped, while it does

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self._is_overflow: bool | torch.Tensor = False
        self._takes_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        if device_placement and optimizer.state:
            # torch moves loaded state to the device of the parameters.
            optimizer.load_state_dict(optimizer.state_dict())

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN or hasattr(type(self), name) or "optimizer" not in self.__dict__
        if own or not hasattr(self.optimizer, name):
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state of the run."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """The position of the run between two optimizer steps."""
        return GradientStateOf(accumulation_of(self))

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state per parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's default options."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """As in the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears gradients, unless they are being accumulated; ``None`` means ``True``."""
        accumulation = accumulation_of(self)
        if not accumulation.sync_gradients:
            return
        accumulation.weights.end_step(self.optimizer.param_groups)
        if self._takes_set_to_none:
            self.optimizer.zero_grad(set_to_none=set_to_none is not False)
        elif set_to_none is None:
            self.optimizer.zero_grad()
        else:
            raise InvalidArgument(f"zero_grad of {type(self.optimizer).__name__} takes no set_to_none")
        note_cleared(self.scaler, self.optimizer)

    def step(self, closure: Any = None) -> Any:
        """Steps the wrapped optimizer and returns what it returns, unless gradients are being accumulated.

        With a scaler, the step is skipped if a gradient is not finite, and the scale is updated.
        """
        accumulation = accumulation_of(self)
        if not accumulation.sync_gradients:
            return None
        accumulation.weights.end_step(self.optimizer.param_groups)
        if closure is not None and current.session is not None:
            closure = current.session.strategy.recomputing(self.optimizer, closure)
        with self._stepping(closure), _rates_times(accumulation.rate_factor, self.optimizer):
            if self.scaler is None or not self.scaler.is_enabled():
                result = self.optimizer.step(closure)
            else:
                settle_before_step(self.scaler, self.optimizer)
                result = self.scaler.step(self.optimizer, closure)
                self._is_overflow = overflowed(self.scaler, self.optimizer)
                update_after_step(self.scaler)
        if current.session is not None and current.session.progress is not None:
            current.session.progress.step_ended(accumulation.reading)
        return result

    def _stepping(self, closure: Any) -> AbstractContextManager[None]:
        """What the way in which the run is parallel does around a step; one with a closure computes gradients."""
        if current.session is None or closure is not None:
            return nullcontext()
        return current.session.strategy.stepping(self.optimizer)

    def train(self) -> None:
        """Puts optimizers with two modes (schedule-free ones) in training mode."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Puts optimizers with two modes (schedule-free ones) in evaluation mode."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite.

        On an accelerator, the first read after a step waits for the device.
        """
        self._is_overflow = bool(self._is_overflow)
        return self._is_overflow

    def __getstate__(self) -> dict[str, Any]:
        settle(self.scaler)  # torch's scalers can only be copied between two steps
        # A scheduler that was created for the wrapper has replaced its step with a local function, which cannot be
        # pickled.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
