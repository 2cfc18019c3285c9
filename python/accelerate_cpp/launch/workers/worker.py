"""One worker process as the supervisor sees it, and the process group that it leads."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from accelerate_cpp.errors import InternalError

Sink = Callable[[bytes], object]


@dataclass(frozen=True)
class Worker:
    """A child process that leads the process group of its own pid.

    ``outputs`` maps the read end of each of its pipes to what takes the bytes; an empty chunk says that no more come.
    ``reap`` collects the ended process. Until then its pid, and so the group's id, cannot be taken by another process.
    """

    rank: int
    pid: int
    outputs: Mapping[int, Sink]
    reap: Callable[[], object]


def exit_code_of_ended(pid: int) -> int:
    """The exit code of child ``pid``, which has ended; negative for a signal. The child is not reaped."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    if end is None:
        raise InternalError(f"waitid returned nothing for process {pid}")
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def is_stopped(pid: int, *, by_signal: bool = False) -> bool:
    """Whether child ``pid`` lives but does not run: SIGSTOP or a debugger has stopped it, and keeps it so.

    ``by_signal``: a debugger, or a profiler, which stops a process for moments, does not count.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # reaped, or a /proc that is missing or hides it
        return False
    return stat[stat.rindex(")") + 2] in ("T" if by_signal else "Tt")


def living_members(groups: Collection[int]) -> list[int]:
    """Pids of the processes in the process groups ``groups`` that have not ended."""
    members = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            stat = (folder / "stat").read_text(errors="replace")
        except OSError:  # ended while we looked, or of another user, whom /proc may hide
            continue
        # "pid (name) state ppid pgrp …"; the name may contain anything, so the fields count from its last parenthesis.
        state, _, group = stat[stat.rindex(")") + 2 :].split()[:3]
        if int(group) in groups and state not in "ZX":
            members.append(int(folder.name))
    return members
