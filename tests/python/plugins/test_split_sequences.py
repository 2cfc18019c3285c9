"""What models have to have for their sequences to be split, as the original checks and changes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import accelerate.big_modeling as original
import pytest
import torch
from torch import nn

from accelerate_cpp import big_modeling

KINDS = [original, big_modeling]


class Attention(nn.Module):
    """Gives back what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def model(**config: Any) -> nn.Module:
    found = nn.Module()
    found.layer, found.other = nn.Module(), Attention()
    found.layer.self_attn = Attention()
    found.config = SimpleNamespace(**config)
    return found


@pytest.mark.parametrize("module", KINDS)
def test_attention_is_causal_instead_of_masked(module: Any) -> None:
    changed, mask = model(layer_types=["full_attention"]), torch.ones(1)
    module._attach_context_parallel_hooks(changed)
    assert changed.layer.self_attn(1, attention_mask=mask) == ((1,), {"attention_mask": None, "is_causal": True})
    assert changed.layer.self_attn(1) == ((1,), {})
    assert changed.other(attention_mask=mask) == ((), {"attention_mask": mask})


@pytest.mark.parametrize("module", KINDS)
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ({"sliding_window": 8}, "sliding_attention"),
    ],
)
def test_layers_that_attend_to_less_are_refused(module: Any, config: dict[str, Any], kind: str) -> None:
    expected = f"Context parallelism does not support attention layers of type .*{kind}.* .model Module"
    with pytest.raises(ValueError, match=expected):
        module._attach_context_parallel_hooks(model(**config))


@pytest.mark.parametrize("module", KINDS)
def test_layers_with_a_state_are_refused_where_sequences_are_split(module: Any) -> None:
    for config in ({"layer_types": ["full_attention"]}, {}):
        module._refuse_recurrent_layers_under_sequence_parallelism(model(**config))
    inside = SimpleNamespace(layer_types=["linear_attention"])
    with pytest.raises(ValueError, match=r"Sequence parallelism does not support .*linear_attention"):
        module._refuse_recurrent_layers_under_sequence_parallelism(model(get_text_config=lambda: inside))
