"""Options of quantization by bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.enums import CustomDtype

__all__ = ["BnbQuantizationConfig"]

_KINDS = ("fp4", "nf4")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """How the weights of linear layers are quantized, to 8 or to 4 bits.

    Attributes:
        load_in_8bit, load_in_4bit: one of them.
        llm_int8_threshold: 8 bits: activations from this value on are multiplied in 16 bits.
        bnb_4bit_quant_type: ``"fp4"`` or ``"nf4"``.
        bnb_4bit_use_double_quant: quantize the scales of blocks, too.
        bnb_4bit_compute_dtype: what 4-bit layers compute in: ``"fp32"``, ``"fp16"``, ``"bf16"`` or a dtype.
        torch_dtype: of everything else; ``None`` means fp16 for 8 bits and ``bnb_4bit_compute_dtype`` for 4.
        skip_modules: names of modules that stay as they are, in ``torch_dtype``.
        keep_in_fp32_modules: names of modules that stay in fp32.
        target_dtype: what weights become, ``torch.int8`` or ``CustomDtype.INT4``.

    Raises:
        InvalidArgument: neither or both numbers of bits, or another option is not one of those.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        if self.load_in_8bit == self.load_in_4bit:
            raise InvalidArgument(
                f"BnbQuantizationConfig: load_in_8bit={self.load_in_8bit} and load_in_4bit={self.load_in_4bit}; "
                "expected one of them to be True"
            )
        self._require("llm_int8_threshold", isinstance(self.llm_int8_threshold, int | float), "a number")
        self._require("bnb_4bit_quant_type", self.bnb_4bit_quant_type in _KINDS, " or ".join(_KINDS))
        for name in ("skip_modules", "keep_in_fp32_modules"):
            self._require(name, isinstance(getattr(self, name), list | None), "a list of names")
        self.bnb_4bit_compute_dtype = self._dtype("bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = self._dtype("torch_dtype")
        self.target_dtype: torch.dtype | CustomDtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise self._wrong(name, expected)

    def _wrong(self, name: str, expected: str) -> InvalidArgument:
        return InvalidArgument(f"BnbQuantizationConfig: {name}={getattr(self, name)!r}; expected {expected}")

    def _dtype(self, name: str) -> torch.dtype:
        found = getattr(self, name)
        dtype = _DTYPES.get(found) if isinstance(found, str) else found
        if not isinstance(dtype, torch.dtype):
            raise self._wrong(name, f"one of {', '.join(_DTYPES)}, or a dtype of torch")
        return dtype
