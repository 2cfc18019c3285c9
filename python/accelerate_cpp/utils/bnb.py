"""Quantization of models by bitsandbytes, under the original's name of the module."""

from __future__ import annotations

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.quantization.bitsandbytes import has_4bit_bnb_layers, load_and_quantize_model
from accelerate_cpp.quantization.options import BnbQuantizationConfig

__all__ = ["BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"]

__getattr__ = lending("utils.bnb")
