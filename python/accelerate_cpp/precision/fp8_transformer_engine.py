"""fp8 through NVIDIA's TransformerEngine: its own layers, computing under its own casting context.

Written for TransformerEngine 2.9 and later; it has not run on a GPU yet.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument

_MULTIPLE = 16  # both sizes of a weight must be multiples of it for a product in fp8


@dataclass(frozen=True)
class Casting:
    """What forward passes run in.

    Attributes:
        recipe: TransformerEngine's, from :func:`casting`.
        during_evaluation: whether modules in evaluation mode compute in fp8, too.
    """

    recipe: Any
    during_evaluation: bool

    def __call__(self, training: bool) -> AbstractContextManager[Any]:
        """The context for a module in training or in evaluation mode."""
        import transformer_engine.pytorch as te

        context: AbstractContextManager[Any] = te.autocast(
            enabled=training or self.during_evaluation, recipe=self.recipe
        )
        return context


def casting(options: Mapping[str, Any]) -> Casting:
    """The casting that the fields of ``TERecipeKwargs`` describe, those with other values than their defaults.

    Raises:
        InvalidArgument: TransformerEngine's recipe has no such option, or the GPU cannot scale blocks.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    given = dict(options)
    during_evaluation = given.pop("use_autocast_during_eval", False)
    blocks = given.pop("use_mxfp8_block_scaling", False)
    kind = recipe.MXFP8BlockScaling if blocks else recipe.DelayedScaling
    unknown = sorted(given.keys() - {option.name for option in fields(kind)})
    if unknown:
        raise InvalidArgument(
            f"TERecipeKwargs sets {', '.join(unknown)}, but the recipe {kind.__name__} of the TransformerEngine that "
            "is installed has no such option; leave it out"
        )
    if blocks:
        available, reason = te.is_mxfp8_available(return_reason=True)
        if not available:
            raise InvalidArgument(f"TERecipeKwargs.use_mxfp8_block_scaling=True: {reason}; leave it out")
    if "fp8_format" in given:
        given["fp8_format"] = getattr(recipe.Format, given["fp8_format"])
    return Casting(kind(**given), during_evaluation)


def convert(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``model`` with TransformerEngine's linear and normalizing layers, and ``optimizer`` with their parameters.

    Linear layers whose sizes are not multiples of 16 stay as they are, and layers that share a parameter with another
    layer, which would lose it.
    """
    _replace_parameters(optimizer, convert_layers(model))
    return model, optimizer


def convert_layers(model: nn.Module, linear: bool = True, norm: bool = True) -> dict[nn.Module, nn.Module]:
    """Gives ``model`` TransformerEngine's layers, as :func:`convert` does.

    Args:
        linear: replace linear layers.
        norm: replace normalizing layers.

    Returns:
        The new layer for each layer that was replaced.
    """
    import transformer_engine.pytorch as te

    kinds = {te.Linear: linear, te.LayerNorm: norm}
    owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())

    def twin_of(layer: nn.Module) -> nn.Module | None:
        alone = all(owners[id(parameter)] == 1 for parameter in layer.parameters(recurse=False))
        twin = _twin(layer) if alone else None
        return twin if twin is not None and kinds[type(twin)] else None

    return _replace_layers(model, twin_of)


def restore_layers(model: nn.Module, linear: bool = True, norm: bool = True) -> dict[nn.Module, nn.Module]:
    """The way back from :func:`convert_layers`, with its arguments and its result."""
    import transformer_engine.pytorch as te

    def plain_layer(layer: nn.Module) -> nn.Module | None:
        weight: Any = layer._parameters.get("weight")
        if linear and isinstance(layer, te.Linear):
            bias = layer._parameters.get("bias")
            has_bias = bias is not None and bias.numel() > 0
            plain: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, **_place_of(weight))
        elif norm and isinstance(layer, te.LayerNorm):
            plain = nn.LayerNorm(weight.shape[0], eps=layer.eps, **_place_of(weight))
        else:
            return None
        return _with_values_of(layer, plain)

    return _replace_layers(model, plain_layer)


def _place_of(tensor: torch.Tensor) -> dict[str, Any]:
    return {"device": tensor.device, "dtype": tensor.dtype}


def _replace_layers(
    model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]
) -> dict[nn.Module, nn.Module]:
    """Puts ``replacement`` of a layer in its place, wherever it stands, unless that is ``None``."""
    replaced: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            new = replaced.get(child) or replacement(child)
            if new is not None:
                replaced[child] = new
                setattr(parent, name, new)
    return replaced


def _twin(module: nn.Module) -> nn.Module | None:
    """TransformerEngine's layer with the parameters' values of ``module``; ``None`` where there is none."""
    import transformer_engine.pytorch as te

    if type(module) is nn.Linear and all(size % _MULTIPLE == 0 for size in module.weight.shape):
        options = {"params_dtype": module.weight.dtype, "device": module.weight.device}
        twin = te.Linear(module.in_features, module.out_features, bias=module.bias is not None, **options)
    elif type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.bias is not None:
        options = {"params_dtype": module.weight.dtype, "device": module.weight.device}
        twin = te.LayerNorm(module.normalized_shape[0], eps=module.eps, **options)
    else:
        return None
    return _with_values_of(module, twin)


def _with_values_of(module: nn.Module, twin: nn.Module) -> nn.Module:
    """``twin`` with the values and settings of the parameters of ``module``."""
    with torch.no_grad():
        for name, own in twin.named_parameters():
            parameter = module._parameters.get(name)
            if parameter is not None:
                own.copy_(parameter)
                own.requires_grad_(parameter.requires_grad)
    return twin.train(module.training)


def _replace_parameters(optimizer: torch.optim.Optimizer, twins: Mapping[nn.Module, nn.Module]) -> None:
    """Lets ``optimizer`` step on the parameters of the new layers, with the state it has for the old ones."""
    new: dict[torch.Tensor, torch.Tensor] = {
        parameter: getattr(twin, name)
        for module, twin in twins.items()
        for name, parameter in module.named_parameters()
    }
    for group in optimizer.param_groups:
        group["params"] = [new.get(parameter, parameter) for parameter in group["params"]]
    for parameter in list(optimizer.state):
        if parameter in new:
            optimizer.state[new[parameter]] = optimizer.state.pop(parameter)


def has_layers(model: nn.Module) -> bool:
    """Whether a module of ``model`` is one of TransformerEngine's layers. Does not import TransformerEngine."""
    te = sys.modules.get("transformer_engine.pytorch")
    return te is not None and any(
        isinstance(module, (te.LayerNorm, te.Linear, te.TransformerLayer)) for module in model.modules()
    )


def weight_dtype(module: nn.Module) -> torch.dtype | None:
    """What ``module`` casts its weight to in training if it is TransformerEngine's linear layer, else ``None``."""
    te = sys.modules.get("transformer_engine.pytorch")
    return torch.float8_e4m3fn if te is not None and isinstance(module, te.Linear) else None
