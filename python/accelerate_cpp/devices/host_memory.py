"""What memory the host has left, and what becomes of memory that this process frees."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

from accelerate_cpp._native import memory_left
from accelerate_cpp.config import env_table

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # <malloc.h>
_MOST_KEPT_BYTES = 2**31 - 1  # mallopt takes an int


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that can be had without swapping: of the machine, or what the tightest control group leaves of it.

    Elsewhere than on Linux: what there is at all, as systems have no common word for what is left of it.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = memory_left(proc=str(proc), mounts=str(groups))
    return total if left is None else min(left, total)


def return_free_memory() -> None:
    """Gives memory that was freed in this process back to the system, as far as its C library can (glibc's)."""
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


@functools.cache
def keep_freed_memory() -> None:
    """Lets memory that one step frees serve the next, as far as the C library can (glibc's).

    It would return much of it to the system, and have it mapped and filled with zeros again in the next step, which
    takes up to a tenth of a step on a CPU. What was kept is returned by :func:`return_free_memory`. Thresholds that the
    user has set by environment variables stay as they are.
    """
    chosen = env_table.MALLOC_TRIM_THRESHOLD.get() or env_table.MALLOC_MMAP_THRESHOLD.get()
    tunables = env_table.GLIBC_TUNABLES.get() or ""
    set_option = _of_c_library("mallopt")
    if set_option is None or chosen or "trim_threshold" in tunables or "mmap_threshold" in tunables:
        return
    # Setting one threshold ends the adaptation of the other. Versions before 2.35 refuse more than 32 MiB here.
    if any(set_option(_M_MMAP_THRESHOLD, size) for size in (1 << 30, 32 << 20)):
        set_option(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def _of_c_library(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)
