"""Options of quantization by bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import accelerate.utils as original
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.quantization.options import BnbQuantizationConfig

BYTES, NIBBLES = {"load_in_8bit": True}, {"load_in_4bit": True}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        BYTES,
        NIBBLES,
        {**BYTES, **NIBBLES},
        {"load_in_8bit": 1},
        {"load_in_4bit": "yes"},
        {**BYTES, "llm_int8_threshold": 5},
        {**BYTES, "llm_int8_threshold": "5"},
        {**NIBBLES, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {**NIBBLES, "bnb_4bit_quant_type": "np4"},
        {**NIBBLES, "bnb_4bit_use_double_quant": 1},
        *({**NIBBLES, "bnb_4bit_compute_dtype": value} for value in ("fp32", "bf16", "fp8", torch.float64, 3)),
        *({**BYTES, "torch_dtype": value} for value in ("fp32", torch.bfloat16, "float32", 3)),
        {**NIBBLES, "torch_dtype": "fp32"},
        {**BYTES, "skip_modules": ["head"], "keep_in_fp32_modules": ["norm"]},
        {**BYTES, "skip_modules": "head"},
        {**BYTES, "keep_in_fp32_modules": "norm"},
    ],
    ids=str,
)
def test_options_come_to_what_they_come_to_in_the_original(
    arguments: dict[str, Any], comes_to: Callable[..., Any]
) -> None:
    assert comes_to(BnbQuantizationConfig, arguments) == comes_to(original.BnbQuantizationConfig, arguments)


def test_the_fields_and_their_order_are_the_originals() -> None:
    theirs = fields(original.BnbQuantizationConfig)
    assert [(field.name, field.default) for field in fields(BnbQuantizationConfig)] == [
        (field.name, field.default) for field in theirs
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "load_in_8bit=False and load_in_4bit=False; expected one of them"),
        ({**NIBBLES, "bnb_4bit_quant_type": "x"}, "bnb_4bit_quant_type='x'; expected fp4 or nf4"),
        ({**BYTES, "torch_dtype": "x"}, "torch_dtype='x'; expected one of fp32, fp16, bf16, or a dtype"),
        ({**BYTES, "skip_modules": "x"}, "skip_modules='x'; expected a list of names"),
    ],
    ids=str,
)
def test_a_refusal_says_what_is_expected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        BnbQuantizationConfig(**arguments)
