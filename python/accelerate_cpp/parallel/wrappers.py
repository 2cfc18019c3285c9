"""The modules that distribute another one which they hold."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel


def without_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` out of what distributes it."""
    inner: Any = module
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # takes long to import; before that, nothing is inside it
    kinds: Any = (DistributedDataParallel, DataParallel, *([] if fsdp is None else [fsdp.FullyShardedDataParallel]))
    while isinstance(inner, kinds):
        inner = inner.module
    return inner  # type: ignore[no-any-return]


def wrappers_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of ``module`` and what is inside it that synchronise gradients."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
