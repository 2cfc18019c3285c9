"""The operands of jax_program.py, which its test knows as well."""

from __future__ import annotations

from typing import Any

import numpy as np

DTYPES = ("float32", "float16", "bfloat16", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool")


def values(rank: int, dtype: str) -> np.ndarray[Any, Any]:
    """Small whole numbers, which add up exactly in every dtype."""
    numbers = (np.arange(6) * (rank + 2) % 5).reshape(2, 3)
    return numbers > 1 if dtype == "bool" else numbers
