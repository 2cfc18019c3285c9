"""Models that several processes hold together before they are prepared."""

from __future__ import annotations

import sys
from typing import Any

import torch


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether torch's FSDP, of either version, or a layout of tensors (``DTensor``) shares out ``model``.

    Torch's modules for that take long to import; before the program has, no model is.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
        if any(isinstance(module, kinds) for module in model.modules()):
            return True
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and any(isinstance(weight, tensors.DTensor) for weight in model.parameters())
