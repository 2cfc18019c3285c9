"""For custom training loops in mixed precision: a torch.autocast context, and a loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate_cpp.devices.selection import available_accelerators
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.enums import DistributedType
from accelerate_cpp.precision.precision import precision_for
from accelerate_cpp.runtime import current
from accelerate_cpp.utils.dataclasses import AutocastKwargs

__all__ = ["get_grad_scaler", "get_mixed_precision_context_manager"]


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """The context in which operations on the device of the run compute in its precision.

    Args:
        native_amp: ``False`` returns a context without effect.
        autocast_kwargs: options of ``torch.autocast``; those of :class:`AutocastKwargs` by default.

    Raises:
        InvalidArgument: there is no ``Accelerator`` or ``AcceleratorState`` whose precision could be used.
    """
    if not native_amp:
        return nullcontext()
    session = current.session
    if session is None or session.config.mixed_precision is None:
        raise InvalidArgument(
            "get_mixed_precision_context_manager: expected a run with a precision, found none; create an Accelerator "
            "first"
        )
    precision = precision_for(session.config.mixed_precision, session.device)
    options = autocast_kwargs or AutocastKwargs()
    return precision.autocast({"enabled": options.enabled, "cache_enabled": options.cache_enabled})


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A scaler that prevents underflow of gradients in fp16, for the device of the run, or otherwise of this machine.

    Args:
        distributed_type: ``FSDP`` returns torch's scaler for sharded gradients.
        kwargs: arguments of ``torch.amp.GradScaler``; ``device`` replaces the device of the run.
    """
    device = kwargs.pop("device", None) or _device_type()
    if distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device=device, **kwargs)
    scaler = precision_for("fp16", torch.device(device)).make_scaler(kwargs)
    assert scaler is not None  # fp16 always has one
    return scaler


def _device_type() -> str:
    if current.session is not None:
        return current.session.device.type
    return next((kind for kind, _ in available_accelerators()), "cpu")
