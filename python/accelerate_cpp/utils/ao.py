"""Models in fp8 by torchao, piece by piece; ``mixed_precision="fp8"`` does all of it in ``prepare``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accelerate_cpp.config import fp8
from accelerate_cpp.precision import fp8_torchao

__all__ = ["convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_ao_layers"]


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Puts linear layers that compute in fp8 in place of those in ``model``; parameters stay the same objects.

    Where the device of ``model`` has no arithmetic in fp8, it is imitated.

    Args:
        config: torchao's ``Float8LinearConfig``; ``None`` is its default.
        module_filter_func: called with each linear layer and its dotted name, says whether that layer is replaced.
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

    Called with a linear layer and its name in a model, as torchao calls filters: whether its sizes are multiples of 16.
    """
    linears = [name for name, found in module.named_modules() if isinstance(found, nn.Linear)]
    if fqn in (*linears[:1], *linears[-1:]):
        return False
    return not isinstance(module, nn.Linear) or fp8_torchao.has_sizes_for_fp8(module)


def has_ao_layers(model: nn.Module) -> bool:
    """Whether a linear layer of ``model`` computes in fp8 through torchao; without that library none does."""
    return any(map(fp8_torchao.is_fp8_layer, model.modules()))
