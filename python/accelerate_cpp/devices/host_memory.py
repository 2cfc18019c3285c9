"""How much memory this machine, or the container that this process is in, still has."""

from __future__ import annotations

import os
from pathlib import Path

from accelerate_cpp._native import memory_left

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that can be had without swapping: of the machine, or what the tightest control group leaves of it.

    Elsewhere than on Linux: what there is at all, as systems have no common word for what is left of it.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = memory_left(proc=str(proc), mounts=str(groups))
    return total if left is None else min(left, total)
