"""The modules that distribute another one which they hold."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel


def without_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """``module`` out of what distributes it."""
    inner: Any = module
    kinds: Any = (DistributedDataParallel, DataParallel, *_kinds_of_libraries())
    while isinstance(inner, kinds):
        inner = inner.module
    return inner  # type: ignore[no-any-return]


def _kinds_of_libraries() -> list[type]:
    """Those of modules that take long to import; before that, nothing is inside one."""
    places = (
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
        ("deepspeed.runtime.engine", "DeepSpeedEngine"),
        ("torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel", "XlaFullyShardedDataParallel"),
        ("torch_xla.distributed.fsdp.xla_flatten_params_wrapper", "XlaFlattenParamsWrapper"),
        ("torch_xla.experimental.spmd_fully_sharded_data_parallel", "SpmdFullyShardedDataParallel"),
    )
    loaded = ((sys.modules.get(module), name) for module, name in places)
    return [getattr(module, name) for module, name in loaded if module is not None and hasattr(module, name)]


def wrappers_in(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of ``module`` and what is inside it that synchronise gradients."""
    return [part for part in module.modules() if isinstance(part, DistributedDataParallel)]
