"""Which activations are computed again in the backward pass, and how much of them is dropped out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["apply_recomputation", "keep_first_layers", "set_dropout"]

_logger = logging.getLogger(__name__)


def apply_recomputation(model: torch.nn.Module, plugin: Any) -> None:
    """Lets ``model`` compute again what the fields ``recompute_...`` of a ``MegatronLMPlugin`` say.

    With ``"full"`` granularity these are layers, one by one, also where ``recompute_num_layers`` would put several
    together; with ``"selective"``, which ``recompute_activations`` means, too, what attention computes.
    """
    granularity = "selective" if plugin.recompute_activations else plugin.recompute_granularity
    if granularity == "selective":
        for module in model.modules():
            if type(module).__name__.endswith("Attention") and not any(
                type(inner).__name__.endswith("Attention") for inner in list(module.modules())[1:]
            ):
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

    Those of attention are its attributes ``attention_dropout`` and ``dropout``, and modules in it with such names or
    ``attn_dropout``; what drops out afterwards, as ``resid_dropout`` in it, is of the rest.
    """
    for name, module in model.named_modules():
        for attribute in ("attention_dropout", "dropout"):
            if type(module).__name__.endswith("Attention") and isinstance(module.__dict__.get(attribute), float):
                setattr(module, attribute, attention)
        if isinstance(module, torch.nn.Dropout):
            own, parent = name.rpartition(".")[2], model.get_submodule(name.rpartition(".")[0])
            kind = type(parent).__name__
            of_attention = own.startswith("attn") or (kind.endswith("Attention") and own == "dropout")
            module.p = attention if of_attention else hidden


def _recompute(module: torch.nn.Module) -> None:
    inner: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, use_reentrant=False, **kwargs)

    module.forward = forward
