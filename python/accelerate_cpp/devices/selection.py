"""The device of this process."""

from __future__ import annotations

import torch

from accelerate_cpp._native import choose_device
from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.table import accelerators, kind_of
from accelerate_cpp.errors import InvalidArgument


def available_devices() -> list[Device]:
    """The kinds of accelerators that torch can use here, best first."""
    return [kind for kind, _ in _counted()]


def available_accelerators() -> list[tuple[str, int]]:
    """The accelerators that torch can use here, as (type, count), best first."""
    return [(kind.type, count) for kind, count in _counted()]


def _counted() -> list[tuple[Device, int]]:
    return [(kind, count) for kind in accelerators() if (count := kind.count()) > 0]


def select_device(*, cpu: bool, forced: str | None, local_rank: int, world_size: int = 1) -> torch.device:
    """The device this process trains on; if it has a number, it becomes the current one of its kind.

    Args:
        cpu: the user asked for the CPU.
        forced: the user's own choice, for example ``"cuda:1"``; takes precedence over everything else.
        local_rank: rank of this process on its host, which picks among several devices.
        world_size: the number of processes that train together.

    Raises:
        InvalidArgument: ``forced`` is not a device or is not present, there are fewer devices than processes, or there
            are several processes, for a kind that trains in one only.
    """
    counted = [] if cpu and not forced else _counted()
    present = [(kind.type, count, kind.index_by_rank) for kind, count in counted]
    name = choose_device(force_cpu=cpu, forced=forced or "", local_rank=local_rank, accelerators=present)
    kind = kind_of(name)
    if kind.one_process and world_size > 1:
        raise InvalidArgument(
            f"{world_size} processes on {kind.title} ({kind.type}): torch trains in one process there. Start one, or "
            "train on the CPU: accelerate-cpp launch --cpu, or Accelerator(cpu=True)"
        )
    return kind.device(name)
