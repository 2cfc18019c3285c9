"""Which activations are computed again in the backward pass, and how much of them is dropped out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["apply_recomputation", "keep_first_layers", "set_dropout"]

_logger = logging.getLogger(__name__)
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout", "hidden_dropout", "resid_dropout", "activation_dropout")


def apply_recomputation(model: torch.nn.Module, plugin: Any) -> None:
    """Lets ``model`` compute again what the fields ``recompute_...`` of a ``MegatronLMPlugin`` say.

    With ``"full"`` granularity these are layers, one by one, also where ``recompute_num_layers`` would put several
    together; with ``"selective"``, which ``recompute_activations`` means, too, what attention computes.
    """
    granularity = "selective" if plugin.recompute_activations else plugin.recompute_granularity
    if granularity == "selective":
        for module in filter(_is_attention, model.modules()):
            _recompute(module)
    elif granularity == "full":
        if getattr(model, "supports_gradient_checkpointing", False):
            # Its newer name, since transformers 5.
            old: Any = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})
        else:
            _logger.info(
                "%s has no gradient_checkpointing_enable, so that recompute_granularity='full' of the MegatronLMPlugin "
                "has no effect",
                type(model).__name__,
            )


def keep_first_layers(stages: list[torch.nn.Module], plugin: Any) -> None:
    """With ``recompute_method="block"``, only the first ``recompute_num_layers`` of each stage are recomputed."""
    if plugin.recompute_activations or (plugin.recompute_granularity, plugin.recompute_method) != ("full", "block"):
        return
    for stage in stages:
        layers = [
            module
            for module in stage.modules()
            if getattr(module, "gradient_checkpointing", False) and hasattr(module, "_gradient_checkpointing_func")
        ]
        for layer in layers[int(plugin.recompute_num_layers or 0) :]:
            layer.gradient_checkpointing = False  # type: ignore[assignment]


def set_dropout(model: torch.nn.Module, attention: float, hidden: float) -> None:
    """Sets the probabilities with which attention and everything else drop elements out.

    Those of attention are ``attention_dropout`` anywhere, and ``dropout`` and ``attn_dropout`` of the innermost modules
    of attention; what drops out afterwards, as ``resid_dropout`` in them, is of the rest. They are numbers or modules.
    """
    for module in model.modules():
        for name in _DROPOUTS:
            own = module.__dict__.get(name, module._modules.get(name))
            of_attention = name.startswith("att") or (name == "dropout" and _is_attention(module))
            probability = attention if of_attention else hidden
            if isinstance(own, torch.nn.Dropout):
                own.p = probability
            elif isinstance(own, (int, float)) and not isinstance(own, bool):
                setattr(module, name, probability)
        for name, child in module.named_children():
            if isinstance(child, torch.nn.Dropout) and name not in _DROPOUTS:
                child.p = hidden


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether ``module`` computes attention, and none of its modules does."""
    inner = list(module.modules())[1:]
    return type(module).__name__.endswith("Attention") and not any(
        type(one).__name__.endswith("Attention") for one in inner
    )


def _recompute(module: torch.nn.Module) -> None:
    inner: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    module.forward = forward
