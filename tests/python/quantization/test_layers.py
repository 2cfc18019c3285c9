"""Which layers bitsandbytes quantizes; test_bnb.py has what becomes of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate_cpp.quantization.layers import kept_by_default, layers_replaced, quantizable_layers
from accelerate_cpp.quantization.options import BnbQuantizationConfig


class Model(nn.Module):
    base_model_prefix = "body"

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 1), nn.Linear(4, 8))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.emb.weight


class Base(nn.Module):
    base_model_prefix = "body"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)


def test_the_head_and_what_shares_parameters_is_kept() -> None:
    assert kept_by_default(Model()) == ["head"]
    assert kept_by_default(Model(tied=True)) == ["emb", "head"]
    assert kept_by_default(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))) == ["1"]
    assert kept_by_default(nn.Linear(1, 1)) == []


def test_a_base_model_has_no_head_but_may_share_parameters() -> None:
    model = Base()
    assert kept_by_default(model) == []
    model.last.weight = model.first.weight
    assert kept_by_default(model) == ["first", "last"]


def test_linear_layers_are_quantized_that_compute_by_themselves_with_a_weight_of_their_own() -> None:
    class Other(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = Model()
    assert quantizable_layers(model, []) == ["body.0", "body.2", "head"]
    assert quantizable_layers(model, ["head", "0"]) == ["body.2"]
    assert quantizable_layers(Model(tied=True), []) == ["body.0", "body.2"]
    model.body[0] = Other(4, 4)
    assert quantizable_layers(model, ["head"]) == ["body.2"]
    assert quantizable_layers(nn.Linear(1, 1), []) == []


def test_layers_are_replaced_with_their_weights_and_come_back_after_an_error() -> None:
    pytest.importorskip("bitsandbytes")
    model = Model().eval()
    old = model.body[0]
    weight = old.weight.detach().clone()
    with (
        pytest.raises(ZeroDivisionError),
        layers_replaced(model, ["body.0"], BnbQuantizationConfig(load_in_8bit=True)),
    ):
        new = model.body[0]
        assert type(new).__name__ == "Linear8bitLt"
        assert torch.equal(new.weight, weight)
        assert torch.equal(new.bias, old.bias)
        assert not new.training
        assert not new.weight.requires_grad
        assert not new.bias.requires_grad
        raise ZeroDivisionError
    assert model.body[0] is old
    assert old.bias.requires_grad
    with layers_replaced(model, ["body.2"], BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)):
        pass
    assert type(model.body[2]).__name__ == "Linear4bit"
    assert (model.body[2].weight.quant_type, model.body[2].weight.compress_statistics) == ("fp4", True)
