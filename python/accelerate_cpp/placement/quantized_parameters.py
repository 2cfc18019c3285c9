"""Parameters of bitsandbytes, which quantize the values that they are given. The library is not imported here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["quantized", "quantizes"]

_CLASSES = ("Int8Params", "Params4bit")


def quantizes(parameter: Tensor | None) -> bool:
    """Whether ``parameter`` is one of bitsandbytes' that has no quantized values yet."""
    kind = type(parameter)
    if kind.__name__ not in _CLASSES or not kind.__module__.startswith("bitsandbytes."):
        return False
    has_values: Any = parameter
    return not getattr(has_values, "bnb_quantized", False) and has_values.dtype != torch.int8


def quantized(parameter: Tensor, value: Tensor, device: torch.device, scales: Tensor | None = None) -> Tensor:
    """A parameter with the class and the options of ``parameter`` and the quantized ``value``, on ``device``.

    Args:
        value: floating point; or ``int8``, which is quantized already.
        scales: of the rows of an ``int8`` value.
    """
    options = {name: option for name, option in vars(parameter).items() if name not in ("CB", "SCB", "quant_state")}
    kind: Any = type(parameter)
    # Of 8 bits only what comes from the CPU is quantized.
    new: Tensor = kind(value.detach().to("cpu"), requires_grad=False, **options).to(device)
    if scales is not None:
        new.SCB = scales.to(device)  # type: ignore[attr-defined]
    return new
