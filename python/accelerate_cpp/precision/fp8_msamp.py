"""fp8 through Microsoft's MS-AMP, which is no longer developed. It has not been run with this package."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def convert(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and the optimizer that MS-AMP makes of these; ``options`` holds ``opt_level``."""
    import msamp

    warnings.warn(
        "MS-AMP is no longer developed; use AORecipeKwargs (torchao) or TERecipeKwargs (TransformerEngine) for fp8",
        FutureWarning,
        stacklevel=2,
    )
    converted: tuple[nn.Module, torch.optim.Optimizer] = msamp.initialize(
        model, optimizer, opt_level=options["opt_level"]
    )
    return converted
