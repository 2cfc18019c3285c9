"""The separate steps that put models in fp8 with torchao; ``mixed_precision="fp8"`` does all of them in ``prepare``."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.config import fp8
from accelerate_cpp.precision import fp8_torchao

__all__ = [
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
]

__getattr__ = lending("utils.ao")


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Replaces linear layers in ``model`` with layers that compute in fp8; parameters stay the same objects.

    If the device of ``model`` does not support fp8, it is imitated.

    Args:
        config: torchao's ``Float8LinearConfig``; ``None`` is its default.
        module_filter_func: called with each linear layer and its dotted name, returns whether that layer is replaced.
            ``None``: all but the first and the last one whose sizes are multiples of 16.

    Raises:
        MissingLibrary: torchao is not installed.
    """
    fp8.require("AO", "convert_model_to_fp8_ao(...)")
    from torchao.float8 import Float8LinearConfig

    options = {"config": Float8LinearConfig() if config is None else config, "module_filter": module_filter_func}
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    fp8_torchao.convert(model, options, device)


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Whether the layer ``fqn`` of ``module`` computes in fp8: not if it is the first or the last linear one.

    A filter for torchao, called with a linear layer and its name: whether its sizes are multiples of 16.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The dotted names of the first and the last linear layer of ``model``; ``None`` if there is none."""
    linears = [name for name, found in model.named_modules() if isinstance(found, nn.Linear)]
    return (linears[0], linears[-1]) if linears else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Collection[str | None]) -> bool:
    """Whether the layer ``fqn``, which is ``module``, computes in fp8.

    It does unless its name is one of ``layers_to_filter``, or its sizes are not multiples of 16.
    """
    if fqn in layers_to_filter:
        return False
    return not isinstance(module, nn.Linear) or fp8_torchao.has_sizes_for_fp8(module)


def has_ao_layers(model: nn.Module) -> bool:
    """Whether a linear layer of ``model`` computes in fp8 through torchao; without that library none does."""
    return any(map(fp8_torchao.is_fp8_layer, model.modules()))
