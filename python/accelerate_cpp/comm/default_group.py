"""This process in torch's default process group."""

from __future__ import annotations

import torch.distributed as dist


def world_size() -> int:
    """Number of processes in torch's default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_index() -> int:
    """This process's rank in torch's default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
