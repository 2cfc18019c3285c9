"""What programs that train through DeepSpeed import: its configuration, stand-ins, and wrappers of its objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin
from accelerate_cpp.plugins.deepspeed_config import HfDeepSpeedConfig
from accelerate_cpp.scheduler import AcceleratedScheduler
from accelerate_cpp.utils.not_yet import map_pytorch_optim_to_deepspeed

__all__ = [
    "DeepSpeedEngineWrapper",
    "DeepSpeedOptimizerWrapper",
    "DeepSpeedSchedulerWrapper",
    "DummyOptim",
    "DummyScheduler",
    "HfDeepSpeedConfig",
    "get_active_deepspeed_plugin",
    "map_pytorch_optim_to_deepspeed",
]

__getattr__ = lending("utils.deepspeed")


def get_active_deepspeed_plugin(state: Any) -> DeepSpeedPlugin:
    """The plugin of ``state``, an ``AcceleratorState``, that is selected.

    Raises:
        InvalidArgument: there is none.
    """
    for plugin in (getattr(state, "deepspeed_plugins", None) or {}).values():
        if isinstance(plugin, DeepSpeedPlugin) and plugin.selected:
            return plugin
    raise InvalidArgument("get_active_deepspeed_plugin: this run does not use DeepSpeed, so there is no plugin")


class DeepSpeedEngineWrapper:
    """An engine of DeepSpeed whose ``backward`` also steps it after the last accumulated gradient.

    Args:
        engine: a ``deepspeed.runtime.engine.DeepSpeedEngine``.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def backward(self, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
        """The backward pass of the engine, and its step, unless gradients only accumulate.

        Args:
            sync_gradients: whether this micro-batch completes a step.
            kwargs: for the engine's ``backward``.
        """
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients)
        self.engine.backward(loss, **kwargs)
        if sync_gradients:
            self.engine.step()

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients before the last step; ``None`` if DeepSpeed does not measure it."""
        norm = self.engine.get_global_grad_norm()
        return float(norm.item() if hasattr(norm, "item") else norm) if norm is not None else None


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer of DeepSpeed, which its engine steps: ``step`` and ``zero_grad`` do nothing."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Does nothing: the engine clears gradients."""

    def step(self, closure: Any = None) -> Any:
        """Does nothing: the engine steps."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        return bool(getattr(self.optimizer, "overflow", False))


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that an engine of DeepSpeed steps: ``step`` does nothing."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the engine steps."""


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
