"""What models need so that their sequences can be split over processes (context and sequence parallelism)."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate_cpp.errors import InvalidArgument

__all__: list[str] = []

_FULL = "full_attention"


def _attach_context_parallel_hooks(model: nn.Module) -> None:
    """Makes the attention of ``model``, its modules ``self_attn``, use causal attention instead of a mask.

    Raises:
        InvalidArgument: according to the model, some layers do not attend to all previous tokens.
    """
    config = _text_config(model)
    found = getattr(config, "layer_types", None)
    if found is None:
        found = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    others = sorted({kind for kind in found if kind != _FULL})
    if others:
        raise InvalidArgument(
            f"Context parallelism does not support attention layers of type {others} (model "
            f"{type(model).__name__}): it can only compute full causal attention, and the masks of these layers would "
            "be dropped; use a model with full attention, or no context parallelism"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_without_mask, with_kwargs=True, prepend=True)


def _without_mask(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if "attention_mask" in kwargs:
        kwargs.update(attention_mask=None, is_causal=True)
    return args, kwargs


def _refuse_recurrent_layers_under_sequence_parallelism(model: nn.Module) -> None:
    """Refuses a ``model`` with layers of linear attention, whose state would start again in each part of a sequence.

    Raises:
        InvalidArgument: its configuration names such layers.
    """
    kinds = getattr(_text_config(model), "layer_types", None) or []
    recurrent = sorted({kind for kind in kinds if "linear_attention" in kind})
    if recurrent:
        raise InvalidArgument(
            f"Sequence parallelism does not support attention layers of type {recurrent} (model "
            f"{type(model).__name__}): their recurrent state would start again on each process, and gradients would be "
            "wrong; use a model with full attention, or no sequence parallelism"
        )


def _text_config(model: Any) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config
