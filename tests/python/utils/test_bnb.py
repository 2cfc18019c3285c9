"""Quantization of models by bitsandbytes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils import bnb
from accelerate_cpp.utils.quantization import BnbQuantizationConfig


class Linear4bit(torch.nn.Linear):
    pass


def test_layers_of_4_bits_are_found_if_the_library_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, plain = torch.nn.Sequential(Linear4bit(1, 1)), torch.nn.Sequential(torch.nn.Linear(1, 1))
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    assert not bnb.has_4bit_bnb_layers(quantized)
    stand_in = SimpleNamespace(nn=SimpleNamespace(Linear4bit=Linear4bit))
    monkeypatch.setitem(sys.modules, "bitsandbytes", stand_in)  # type: ignore[arg-type]
    assert bnb.has_4bit_bnb_layers(quantized)
    assert not bnb.has_4bit_bnb_layers(plain)


def test_quantizing_a_model_is_refused() -> None:
    config = bnb.BnbQuantizationConfig(load_in_8bit=True)
    assert isinstance(config, BnbQuantizationConfig)
    with pytest.raises(InvalidArgument, match=r"load_and_quantize_model\(\.\.\.\): quantization through bitsandbytes"):
        bnb.load_and_quantize_model(torch.nn.Linear(1, 1), config)
