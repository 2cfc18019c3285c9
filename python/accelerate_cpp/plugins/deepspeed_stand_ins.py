"""Placeholders for the optimizer and the schedule that the configuration of DeepSpeed describes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["DummyOptim", "DummyScheduler"]


class DummyOptim:
    """A placeholder for the optimizer in the configuration of DeepSpeed.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate, if the configuration says ``"auto"``.
        weight_decay: the same.
        kwargs: kept as they are.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.001, weight_decay: float = 0, **kwargs: Any) -> None:
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs


class DummyScheduler:
    """A placeholder for the schedule in the configuration of DeepSpeed.

    Args:
        optimizer: the optimizer, or a :class:`DummyOptim`.
        total_num_steps: the length of the schedule, if the configuration says ``"auto"``.
        warmup_num_steps: the length of its warm-up.
        lr_scheduler_callable: creates a torch schedule for the optimizer that DeepSpeed creates.
        kwargs: kept as they are.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps
        self.lr_scheduler_callable, self.kwargs = lr_scheduler_callable, kwargs
