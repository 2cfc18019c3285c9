"""What programs that train through DeepSpeed import: its configuration, stand-ins, and wrappers of its objects."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.deepspeed.optimizers import cpu_form_of
from accelerate_cpp.plugins.deepspeed import DeepSpeedPlugin, active_plugin
from accelerate_cpp.plugins.deepspeed_config import HfDeepSpeedConfig
from accelerate_cpp.plugins.deepspeed_stand_ins import DummyOptim, DummyScheduler
from accelerate_cpp.utils.stepped_by_engines import OptimizerOfEngine, ScheduleOfEngine

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
    plugins = getattr(state, "deepspeed_plugins", None)
    if not plugins:
        raise InvalidArgument("get_active_deepspeed_plugin: this run does not use DeepSpeed, so there is no plugin")
    return active_plugin(plugins)


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer of DeepSpeed that takes the same steps on the host, over the same parameter groups.

    Raises:
        InvalidArgument: there is none; the original returns Adam for everything that it does not know.
    """
    made = cpu_form_of(optimizer)
    if made is None:
        raise InvalidArgument(
            f"map_pytorch_optim_to_deepspeed: DeepSpeed has no optimizer for the host that steps as this "
            f"{type(optimizer).__name__}; use AdamW, Adam (without amsgrad or maximize) or Adagrad of torch, or a "
            "32-bit one of bitsandbytes"
        )
    return made


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


class DeepSpeedOptimizerWrapper(OptimizerOfEngine):
    """An optimizer of DeepSpeed, which its engine steps: ``step`` and ``zero_grad`` do nothing."""

    _skipped_attribute = "overflow"


class DeepSpeedSchedulerWrapper(ScheduleOfEngine):
    """A schedule that an engine of DeepSpeed steps: ``step`` does nothing."""
