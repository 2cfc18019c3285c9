"""fp8 through torchao: linear layers that cast their operands to fp8, each tensor with a scale of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accelerate_cpp.devices.table import kind_of

_MULTIPLE = 16  # both sizes of a weight must be multiples of it for a product in fp8

Filter = Callable[[nn.Module, str], bool]


def default_filter(model: nn.Module) -> Filter:
    """Which layers of ``model`` compute in fp8: a function of a layer and its dotted name.

    These are the linear layers whose sizes are multiples of 16, except for the first and the last one of the model:
    training is often unstable when these lose precision. Layers that do not compute as ``torch.nn.Linear`` does are
    left out, too: subclasses with their own ``forward``, and layers whose weight ``torch.nn.MultiheadAttention`` reads
    directly.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    outer = frozenset({*linears[:1], *linears[-1:]})

    def computes_in_fp8(module: nn.Module, name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and name not in outer
            and type(module).forward is nn.Linear.forward
            and not isinstance(module, NonDynamicallyQuantizableLinear)
            and has_sizes_for_fp8(module)
        )

    return computes_in_fp8


def has_sizes_for_fp8(layer: nn.Linear) -> bool:
    """Whether products with the weight of ``layer`` can be computed in fp8."""
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def convert(model: nn.Module, options: Mapping[str, Any], device_type: str) -> nn.Module:
    """``model`` with layers that compute in fp8 in place of some of its linear ones; parameters stay the same objects.

    Args:
        model: converted in place, unless it is a linear layer itself.
        options: ``config``, torchao's ``Float8LinearConfig``, and ``module_filter``, which replaces
            :func:`default_filter` unless it is ``None``.
        device_type: where there is no arithmetic in fp8, operands are rounded to it and multiplied in ``float32``.

    Returns:
        The model to train.
    """
    from torchao.float8 import convert_to_float8_training

    # Weights that are gathered in fp8 are parameters of another class: optimizers would step on the old ones. And
    # there is nothing to gather where every process holds the whole model.
    config = replace(
        options["config"],
        enable_fsdp_float8_all_gather=False,
        emulate=options["config"].emulate or kind_of(device_type).emulates_fp8,
    )
    filter_ = options["module_filter"] or default_filter(model)
    converted: nn.Module = convert_to_float8_training(model, module_filter_fn=filter_, config=config)
    return converted


def is_fp8_layer(module: nn.Module) -> bool:
    """Whether ``module`` is one of torchao's layers in fp8. Does not import torchao."""
    layers = sys.modules.get("torchao.float8.float8_linear")
    return layers is not None and isinstance(module, layers.Float8Linear)


def weight_dtype(module: nn.Module) -> torch.dtype | None:
    """What ``module`` casts its weight to if it is one of torchao's layers in fp8, else ``None``."""
    if not is_fp8_layer(module):
        return None
    config: Any = module.config
    cast: Any = config.cast_config_weight
    return cast.target_dtype if cast.scaling_type.value != "disabled" else None
