"""Quantization of models by bitsandbytes: its options, and what a model has of it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from accelerate_cpp.utils.not_yet import load_and_quantize_model
from accelerate_cpp.utils.quantization import BnbQuantizationConfig

__all__ = ["BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"]


def has_4bit_bnb_layers(model: torch.nn.Module) -> bool:
    """Whether a layer of ``model`` is bitsandbytes' ``Linear4bit``. Does not import bitsandbytes."""
    library: Any = sys.modules.get("bitsandbytes")
    return library is not None and any(isinstance(module, library.nn.Linear4bit) for module in model.modules())
