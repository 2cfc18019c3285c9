"""The device of this process."""

from __future__ import annotations

import torch

from accelerate_cpp._native import choose_device

# Best first. A type that this build of torch does not know has no module and counts as absent.
_ACCELERATOR_TYPES = ("cuda", "xpu", "mps")


def available_accelerators() -> list[tuple[str, int]]:
    """The accelerators that torch can use here, as (type, count), best first."""
    found = []
    for device_type in _ACCELERATOR_TYPES:
        module = getattr(torch, device_type, None)
        if module is not None and module.is_available():
            found.append((device_type, module.device_count()))
    return found


def select_device(*, cpu: bool, forced: str | None, local_rank: int) -> torch.device:
    """The device this process trains on; on CUDA and XPU it becomes the current device.

    Args:
        cpu: the user asked for the CPU.
        forced: the user's own choice, for example ``"cuda:1"``; takes precedence over everything else.
        local_rank: rank of this process on its host, which picks among several devices.

    Raises:
        InvalidArgument: ``forced`` is not a device or is not present, or there are fewer devices than processes.
    """
    accelerators = [] if cpu and not forced else available_accelerators()
    device = torch.device(
        choose_device(force_cpu=cpu, forced=forced or "", local_rank=local_rank, accelerators=accelerators)
    )
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).set_device(device)
    return device
