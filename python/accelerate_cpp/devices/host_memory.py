"""How much memory this machine, or the container that this process is in, still has."""

from __future__ import annotations

import os
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# By version of control groups: the file with the limit, the one with what is used, and the line of memory.stat that
# says how much of it is cached files, which make room when memory is asked for.
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(proc: Path = _PROC, groups: Path = _GROUPS) -> int:
    """Bytes that can be had without swapping: of the machine, or what the tightest control group leaves of it."""
    limits = [*_left_in_groups(proc / "self" / "cgroup", groups), _of_machine(proc / "meminfo")]
    return max(0, min(limits))


def _of_machine(meminfo: Path) -> int:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere than on Linux: what there is at all, as systems have no common word for what is left of it.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_in_groups(listing: Path, groups: Path) -> list[int]:
    """What each control group leaves that this process is in, directly or not; none where there is no limit."""
    left = []
    for line in listing.read_text().splitlines() if listing.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, root = (1, groups / "memory") if controllers else (2, groups)
        folder = root / path.lstrip("/")
        for level in (folder, *folder.parents):
            found = _left_in(level, *_FILES[version])
            if found is not None:
                left.append(found)
            if level == root:
                break
    return left


def _left_in(folder: Path, limit_name: str, used_name: str, cached_name: str) -> int | None:
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or used is None:
        return None
    return limit - used + _cached(folder / "memory.stat", cached_name)


def _number(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdecimal() else None


def _cached(path: Path, name: str) -> int:
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
