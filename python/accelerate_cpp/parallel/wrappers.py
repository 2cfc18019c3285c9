"""The modules that distribute another one which they hold."""

from __future__ import annotations

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel


def without_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` out of what distributes it."""
    while isinstance(module, (DistributedDataParallel, DataParallel)):
        module = module.module
    return module


def wrappers_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of ``module`` and what is inside it that synchronise gradients."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
