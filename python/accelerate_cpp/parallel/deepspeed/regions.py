"""Compiling repeated blocks of an engine's model in place: hooks of DeepSpeed hold its modules."""

from __future__ import annotations

from typing import Any

import torch

from accelerate_cpp.parallel.compilation import has_repeated_blocks, is_repeated_blocks

__all__ = ["compile_regions_deepspeed"]


def compile_regions_deepspeed(module: torch.nn.Module, **compile_kwargs: Any) -> None:
    """Compiles each block of lists of blocks of one class, and what has no such list as a whole.

    Args:
        compile_kwargs: arguments of ``torch.compile``.
    """
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_deepspeed(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)
