"""Models that several processes hold together before they are prepared: of those none has a copy to be averaged."""

from __future__ import annotations

import sys
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether torch's FSDP, of either version, or a layout of tensors (``DTensor``) shares out ``model``."""
    return _kind_of(model) is not None


def require_whole(model: torch.nn.Module, num_processes: int) -> None:
    """Raises ``InvalidArgument`` if ``model`` is sharded and trained: only the library that sharded it can average it.

    Args:
        num_processes: that train; one has the whole of every model.
    """
    kind = _kind_of(model)
    if num_processes == 1 or kind is None or not any(weight.requires_grad for weight in model.parameters()):
        return
    raise InvalidArgument(
        f"prepare: {type(model).__name__} is already sharded ({kind[0]}), so the {num_processes} processes have no "
        "full copies whose gradients could be averaged. Pass the Accelerator "
        "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), and the model is trained as it is; or leave the "
        f"model out, and {kind[1]}"
    )


def _kind_of(model: torch.nn.Module) -> tuple[str, str] | None:
    """How ``model`` is sharded, and what to do with it; torch's modules for that take long to import."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for name, module in model.named_modules():
            if isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)):
                place = f"by FSDP at {name!r}" if name else "by FSDP"
                return place, "prepare its optimizer, scheduler and loaders: FSDP averages its gradients itself"
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    if tensors is not None:
        for name, weight in model.named_parameters():
            if isinstance(weight, tensors.DTensor):
                return (
                    f"{name!r} is a DTensor",
                    "its loaders, too, where processes have to get the same batches, as in tensor parallelism",
                )
    return None
