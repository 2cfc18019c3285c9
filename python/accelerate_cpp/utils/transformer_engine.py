"""The separate steps for fp8 with NVIDIA's TransformerEngine; ``mixed_precision="fp8"`` does all of them in
``prepare``.

Written for TransformerEngine 2.9 and later; it has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.config import fp8
from accelerate_cpp.precision import fp8_transformer_engine
from accelerate_cpp.precision.fp8_transformer_engine import Casting

__all__ = ["apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers"]

__getattr__ = lending("utils.transformer_engine")


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replaces torch's linear and normalizing layers in ``model`` with TransformerEngine's, or the other way round.

    Values, dtype, device and training mode are kept. Linear layers whose sizes are not multiples of 16, and layers that
    share a parameter with others, are not replaced. Parameters are new objects: create optimizers afterwards.

    Args:
        to_transformer_engine: ``False`` converts back.
        _convert_linear: replace linear layers.
        _convert_ln: replace normalizing layers.

    Raises:
        MissingLibrary: TransformerEngine is not installed.
    """
    fp8.require("TE", "convert_model(...)")
    replace = fp8_transformer_engine.convert_layers if to_transformer_engine else fp8_transformer_engine.restore_layers
    replace(model, linear=_convert_linear, norm=_convert_ln)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a layer of ``model`` is TransformerEngine's; without that library none is."""
    return fp8_transformer_engine.has_layers(model)


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """A method ``forward`` that computes ``model_forward`` in fp8 while its module is in training mode.

    Args:
        model_forward: the original method, bound to the module.
        fp8_recipe: TransformerEngine's recipe.
        use_during_eval: compute in fp8 in evaluation mode, too.

    Returns:
        A function of the module and the arguments of ``model_forward``, which it has as ``__wrapped__``.

    Raises:
        MissingLibrary: TransformerEngine is not installed.
    """
    fp8.require("TE", "contextual_fp8_autocast(...)")
    casting = Casting(fp8_recipe, use_during_eval)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with casting(self.training):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Makes the forward passes of ``model`` compute in fp8, and returns it.

    Args:
        fp8_recipe_handler: a ``TERecipeKwargs``; ``None`` means its defaults.

    Raises:
        MissingLibrary: TransformerEngine is not installed.
        InvalidArgument: its recipe lacks an option, or the GPU cannot scale blocks.
    """
    fp8.require("TE", "apply_fp8_autowrap(...)")
    options = {} if fp8_recipe_handler is None else fp8_recipe_handler.fp8_config().options
    casting = fp8_transformer_engine.casting(options)
    forward = contextual_fp8_autocast(model.forward, casting.recipe, casting.during_evaluation)
    model.forward = MethodType(forward, model)
    return model
