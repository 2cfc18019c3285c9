"""Makes models compute in fp8, through the library that the configuration of the run names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate_cpp.config.fp8 import LIBRARIES
from accelerate_cpp.config.session_config import Fp8Config
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision import fp8_msamp, fp8_torchao, fp8_transformer_engine

_Pair = tuple[nn.Module, torch.optim.Optimizer]

# Libraries that replace parameters need the optimizer that steps on them.
_PAIRWISE: Mapping[str, Callable[[nn.Module, torch.optim.Optimizer, Mapping[str, Any]], _Pair]] = {
    "TE": fp8_transformer_engine.convert,
    "MSAMP": fp8_msamp.convert,
}


def require_device(config: Fp8Config, device: torch.device) -> None:
    """Checks that the library of ``config`` computes on ``device``.

    Raises:
        InvalidArgument: it does not, or the device does not support fp8.
    """
    if config.backend in _PAIRWISE and device.type != "cuda":
        raise InvalidArgument(
            f"fp8 training through {LIBRARIES[config.backend].title} needs an NVIDIA GPU, but this run is on "
            f"{device.type}; use {LIBRARIES['AO'].recipe}(), for torchao"
        )
    lacking = kind_of(device).lacks("fp8", device)
    if lacking is not None:
        raise InvalidArgument(f"mixed_precision='fp8': {lacking}; use 'bf16'")


def convert_to_fp8(
    config: Fp8Config | None,
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    device_type: str,
    convert_by_torchao: Callable[..., Any] | None = None,
) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """The models and optimizers to train instead of those passed, in the same order; without ``config``, those passed.

    Args:
        convert_by_torchao: the function by which a program has replaced ``convert_model_to_fp8_ao``, if it has; it is
            called with a model, ``config`` and ``module_filter_func``, and converts the model in place.

    Raises:
        InvalidArgument: the library needs one model and its optimizer together, and found others.
    """
    if config is None or not (models or optimizers):
        return list(models), list(optimizers)
    if config.backend == "AO" and convert_by_torchao is not None:
        for model in models:
            convert_by_torchao(
                model, config=config.options["config"], module_filter_func=config.options["module_filter"]
            )
        return list(models), list(optimizers)
    if config.backend == "AO":
        return [fp8_torchao.convert(model, config.options, device_type) for model in models], list(optimizers)
    if len(models) != 1 or len(optimizers) != 1:
        raise InvalidArgument(
            f"prepare: fp8 training through {LIBRARIES[config.backend].title} needs one model and its optimizer in one "
            f"call, found {len(models)} models and {len(optimizers)} optimizers"
        )
    model, optimizer = _PAIRWISE[config.backend](models[0], optimizers[0], config.options)
    return [model], [optimizer]
