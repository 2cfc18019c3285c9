"""What drops out in models of transformers, and what is computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.prepare.megatron.recompute import apply_recomputation, set_dropout


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.3
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.3), nn.Dropout(0.3)
        self.attention_dropout = 0
        self.is_causal = True
        self.project = nn.Linear(2, 2)
        self.calls = 0

    def forward(self, hidden: torch.Tensor) -> Any:
        self.calls += 1
        return self.project(hidden).tanh()


class LayerSelfAttention(nn.Module):
    """As of T5: what drops out here is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.SelfAttention = SelfAttention()
        self.dropout = nn.Dropout(0.3)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.dropout(self.SelfAttention(hidden))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = LayerSelfAttention()
        self.dropout = 0.3
        self.drop, self.activation_dropout = nn.Dropout(0.3), 0.3

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.attention(hidden)


def test_attention_and_the_rest_have_probabilities_of_their_own() -> None:
    layer = Layer()
    set_dropout(layer, 0.1, 0.2)
    inner = layer.attention.SelfAttention
    assert (inner.dropout, inner.attn_dropout.p, inner.attention_dropout) == (0.1, 0.1, 0.1)
    assert inner.is_causal is True
    rest = (inner.resid_dropout.p, layer.attention.dropout.p, layer.dropout, layer.drop.p, layer.activation_dropout)
    assert rest == (0.2,) * 5


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"recompute_granularity": "selective"}, 2),
        ({"recompute_activations": True, "recompute_granularity": "none"}, 2),
        ({"recompute_granularity": "none"}, 1),
        ({"recompute_granularity": "full"}, 1),  # of models that can do so by themselves
    ],
    ids=str,
)
def test_attention_is_computed_again_if_asked_for(fields: dict[str, Any], calls: int) -> None:
    layer = Layer()
    apply_recomputation(layer, SimpleNamespace(**{"recompute_activations": False, **fields}))
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.attention.SelfAttention.calls == calls
    with torch.no_grad():
        layer(torch.ones(1, 2))
    assert layer.attention.SelfAttention.calls == calls + 1
