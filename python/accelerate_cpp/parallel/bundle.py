"""The objects of one ``prepare`` call. Strategies get all of them: some treat models and optimizers together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Bundle:
    """Objects of one ``prepare`` call, by kind; ``None`` means that there is none."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
