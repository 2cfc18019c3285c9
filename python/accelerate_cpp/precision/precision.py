"""The precision of a run: what its passes compute in, and whether the loss is scaled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from accelerate_cpp.config.session_config import Fp8Config
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision import fp8_transformer_engine
from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
from accelerate_cpp.precision.fp8 import require_device
from accelerate_cpp.precision.grad_scaler import GradScaler

_COMPUTE_DTYPES: dict[str, torch.dtype | None] = {
    "no": None,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,  # for everything but the layers that were converted
}


@dataclass(frozen=True)
class Precision:
    """The precision of a run on one kind of device.

    Attributes:
        name: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        compute_dtype: of the operations that ``torch.autocast`` converts; ``None`` when it converts none.
        device_type: as in ``torch.device.type``.
        fp8_casting: what else forward passes run in, asked by whether the module is in training mode.
        scales_fp8_loss: whether the loss is scaled although nothing computes in fp16.
    """

    name: str
    compute_dtype: torch.dtype | None
    device_type: str
    fp8_casting: fp8_transformer_engine.Casting | None = None
    scales_fp8_loss: bool = False

    def autocast(self, options: Mapping[str, Any] | None = None) -> AbstractContextManager[Any]:
        """The context in which operations compute in ``compute_dtype``; nothing changes in full precision.

        Args:
            options: ``enabled`` and ``cache_enabled`` of ``torch.autocast``.
        """
        if self.compute_dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.compute_dtype, **(options or {}))

    def forward_context(self, options: Mapping[str, Any], training: bool) -> AbstractContextManager[Any]:
        """The context in which the forward pass of a prepared model runs; ``training`` is the mode of the module."""
        casting = self.autocast(options)
        return casting if self.fp8_casting is None else _both(casting, self.fp8_casting(training))

    def make_scaler(
        self,
        options: Mapping[str, Any] | None = None,
        gradients_are_measured: bool = False,
        layers_are_split: bool = False,
        any_rank: Callable[[bool], bool] | None = None,
    ) -> torch.amp.GradScaler | None:
        """The scaler that prevents underflow of gradients in fp16; ``None`` if the exponent is as wide as that of fp32.

        On the CPU it is :class:`GradScaler`, elsewhere torch's own.

        Args:
            options: arguments of ``torch.amp.GradScaler`` but for the device.
            gradients_are_measured: whether our reducer averages gradients on an accelerator, and measures them on the
                way: :class:`DeviceGradScaler` then spares passes over them.
            layers_are_split: whether optimizers have parameters of which each process holds a part beside others:
                :class:`DeviceGradScaler` takes both, torch's scaler does not.
            any_rank: as :class:`GradScaler` takes it.
        """
        if self.name != "fp16" and not self.scales_fp8_loss:
            return None
        if self.device_type == "cpu":
            return GradScaler(any_rank=any_rank, **(options or {}))
        if gradients_are_measured or layers_are_split:
            return DeviceGradScaler(self.device_type, **(options or {}))
        return kind_of(self.device_type).grad_scaler(**(options or {}))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def precision_for(name: str | None, device: torch.device, fp8: Fp8Config | None = None) -> Precision:
    """The precision called ``name`` (``None`` means ``"no"``) on ``device``.

    Args:
        fp8: the recipe of ``"fp8"``; without one, models compute in bf16.

    Raises:
        InvalidArgument: the name is unknown, or the device has no arithmetic for it.
    """
    name = name or "no"
    if name not in _COMPUTE_DTYPES:
        raise InvalidArgument(f"mixed_precision={name!r}: expected one of {', '.join(_COMPUTE_DTYPES)}")
    lacking = kind_of(device).lacks(name, device) if name in ("fp16", "bf16") else None
    if lacking is not None:
        raise InvalidArgument(
            f"mixed_precision={name!r}: {lacking}; use {'bf16' if name == 'fp16' else 'fp16'!r} or 'no'"
        )
    if fp8 is None:
        return Precision(name, _COMPUTE_DTYPES[name], device.type)
    require_device(fp8, device)
    casting = fp8_transformer_engine.casting(fp8.options) if fp8.backend == "TE" else None
    return Precision(name, _COMPUTE_DTYPES[name], device.type, casting, scales_fp8_loss=fp8.backend == "MSAMP")
