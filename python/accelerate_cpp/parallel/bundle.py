"""Prepared objects by kind. Strategies and checkpoints get all of them: some treat models and optimizers together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Bundle:
    """The objects of one ``prepare`` call, or of all of them, in the order of ``prepare``, and the loss scaler."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    dataloaders: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scaler: Any = None
