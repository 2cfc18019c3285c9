"""Collectives, over the Gloo group that joined at ``xla://``, and what else is asked of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import torch_xla
from torch_xla import runtime

REDUCE_SUM, REDUCE_MAX, REDUCE_MIN = "sum", "max", "min"
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_seed = 0


def all_reduce(reduce_type: str, inputs: Sequence[torch.Tensor], scale: float = 1.0) -> Sequence[torch.Tensor]:
    torch_xla.calls.append(f"all_reduce {reduce_type} of {len(inputs)}")
    for tensor in inputs:
        dist.all_reduce(tensor, _OPERATIONS[reduce_type])
        if scale != 1.0:
            tensor.mul_(scale)
    return inputs


def all_gather(value: torch.Tensor, dim: int = 0) -> torch.Tensor:
    torch_xla.calls.append("all_gather")
    parts = [torch.empty_like(value) for _ in range(runtime.world_size())]
    dist.all_gather(parts, value)
    return torch.cat(parts, dim)


def wait_device_ops() -> None:
    torch_xla.calls.append("wait_device_ops")


def set_rng_state(seed: int) -> None:
    global _seed
    _seed = seed


def get_rng_state() -> int:
    return _seed


def xla_device_hw(device: Any) -> str:
    return "TPU"


def get_memory_info(device: Any) -> dict[str, int]:
    return {"bytes_limit": 1 << 34, "bytes_used": 1 << 30}


def _maybe_convert_to_cpu(data: list[torch.Tensor]) -> list[torch.Tensor]:
    torch_xla.calls.append(f"to CPU {len(data)}")
    return [tensor.clone() for tensor in data]
