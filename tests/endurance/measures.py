"""What a process holds, as /proc tells others: memory, descriptors, threads, memory files, children. Linux only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PAGES = ("anonymous_bytes", "shared_bytes")
COUNTS = ("descriptors", "threads", "memory_files", "mappings", "children", "named_memory", "temporary_files")


def measured(process: int, temporary: Path) -> dict[str, int]:
    """The present measures of a process, by name.

    ``anonymous_bytes`` and ``shared_bytes`` are its own resident memory and its share (by the number of processes that
    have a page) of resident memory files; pages of programs and libraries are left out, since that share depends on
    what else runs on the machine. ``memory_files`` are distinct ones that it has open or mapped, ``mappings`` the
    places where it has mapped them, ``named_memory`` the files in its /dev/shm, ``temporary_files`` all below
    ``temporary``.

    Raises:
        OSError: there is no such process.
    """
    folder = Path(f"/proc/{process}")
    resident = _fields(folder / "smaps_rollup")
    targets = [*_targets(folder / "fd")]
    mapped = [line.split(maxsplit=5) for line in (folder / "maps").read_text().splitlines() if "/memfd:" in line]
    opened = {inode for target, inode in targets if "/memfd:" in target}
    return {
        "anonymous_bytes": resident["Pss_Anon"] * 1024,
        "shared_bytes": resident["Pss_Shmem"] * 1024,
        "descriptors": len(targets),
        "threads": _fields(folder / "status")["Threads"],
        "memory_files": len(opened | {int(line[4]) for line in mapped}),
        "mappings": len(mapped),
        "children": len(_children(folder)),
        "named_memory": len(os.listdir(folder / "root/dev/shm")),
        "temporary_files": sum(len(folders) + len(files) for _, folders, files in os.walk(temporary)),
    }


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file of lines such as ``Name:  12 kB``."""
    found = {}
    for line in file.read_text().splitlines():
        name, _, rest = line.partition(":")
        with suppress(ValueError, IndexError):
            found[name] = int(rest.split()[0])
    return found


def _targets(folder: Path) -> list[tuple[str, int]]:
    """What the descriptors of a process refer to, with the number of the inode."""
    found = []
    for name in os.listdir(folder):
        with suppress(FileNotFoundError):
            found.append((os.readlink(folder / name), os.stat(folder / name).st_ino))
    return found


def _children(folder: Path) -> list[str]:
    return [child for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()]
