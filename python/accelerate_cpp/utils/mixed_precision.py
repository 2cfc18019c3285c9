"""What loops of one's own need to train in mixed precision: a context of torch.autocast, and a scaler of the loss."""

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
    """The context in which operations compute in the precision of the run, on its device.

    Args:
        native_amp: ``False`` gives a context that changes nothing.
        autocast_kwargs: options of ``torch.autocast``; those of :class:`AutocastKwargs` by default.

    Raises:
        InvalidArgument: there is no ``Accelerator`` or ``AcceleratorState`` whose precision could be used.
    """
    if not native_amp:
        return nullcontext()
    session = current.session
    if session is None or session.config.mixed_precision is None:
        raise InvalidArgument(
            "get_mixed_precision_context_manager: expected a run with a precision, found none; make an Accelerator "
            "before"
        )
    precision = precision_for(session.config.mixed_precision, session.device)
    options = autocast_kwargs or AutocastKwargs()
    return precision.autocast({"enabled": options.enabled, "cache_enabled": options.cache_enabled})


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """A scaler that keeps small gradients from vanishing in fp16, for the device of the run, or else of this machine.

    Args:
        distributed_type: ``FSDP`` gives the scaler of torch that knows sharded gradients.
        kwargs: arguments of ``torch.amp.GradScaler``; ``device`` counts instead of the device of the run.
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
