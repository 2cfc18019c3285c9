"""How encoders of transformers are split, for which it has no plan, and whose attention lies in several modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from accelerate_cpp.parallel.tensor.styles import COLUMNS, ROWS

__all__ = ["known_styles"]

_OF_HEADS = "of heads"
"""An embedding with an entry for each head, which is not put together again."""
_LIKE_BERT: Mapping[str, str] = {
    r"attention\.self\.(query|key|value)": COLUMNS,
    r"layer\.\d+\.attention\.output\.dense": ROWS,
    r"layer\.\d+\.intermediate\.dense": COLUMNS,
    r"layer\.\d+\.output\.dense": ROWS,
}
_LIKE_T5: Mapping[str, str] = {
    r"(Self|EncDec)Attention\.(q|k|v)": COLUMNS,
    r"(Self|EncDec)Attention\.o": ROWS,
    r"(Self|EncDec)Attention\.relative_attention_bias": _OF_HEADS,
    r"DenseReluDense\.wi(_\d)?": COLUMNS,
    r"DenseReluDense\.wo": ROWS,
}
_PLANS: Mapping[str, tuple[Mapping[str, str], str]] = {
    **dict.fromkeys(("bert", "megatron-bert", "roberta", "xlm-roberta"), (_LIKE_BERT, r"attention\.self")),
    **dict.fromkeys(("t5", "mt5", "umt5"), (_LIKE_T5, r"(Self|EncDec)Attention")),
}
"""By the ``model_type`` of a configuration: styles of modules, and the modules that know how many heads they have."""


def known_styles(model: nn.Module) -> tuple[dict[str, Any], list[str]] | None:
    """The styles of the modules of ``model`` by their names, and the names of those with a number of heads.

    Returns:
        ``None`` for a model of another kind.
    """
    found = _PLANS.get(str(getattr(getattr(model, "config", None), "model_type", "")))
    if found is None:
        return None
    patterns, attention = found
    names = [name for name, _ in model.named_modules()]

    def ending_in(pattern: str) -> list[str]:
        expression = re.compile(rf"(.*\.)?{pattern}")
        return [name for name in names if expression.fullmatch(name)]

    styles = {name: _style(style) for pattern, style in patterns.items() for name in ending_in(pattern)}
    return styles, ending_in(attention)


def _style(style: str) -> Any:
    if style != _OF_HEADS:
        return style
    from torch.distributed.tensor.parallel import ColwiseParallel

    return ColwiseParallel()
