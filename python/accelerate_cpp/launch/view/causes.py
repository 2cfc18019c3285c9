"""Why a rank is slower than the others: what its main thread did in the time that the others waited for it.

Linux says of each thread how long it computed, and how long it was ready to and had no core; of a process, how many
pages were read for it from a disk; and in which state a thread is, which is looked at repeatedly. What a rank has more
of in each step than the others is the cause, if it makes up half of what it is slower by.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from accelerate_cpp.launch.view.slowest_rank import stragglers
from accelerate_cpp.runtime.progress_board import Standing

WINDOW_LOOKS = 20
_EXPLAINED_SHARE = 0.5
_PAGES_PER_STEP = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """What a process has used at a moment.

    Attributes:
        at: seconds of the monotonic clock.
        steps: that it had made.
        computed: seconds that its main thread computed.
        queued: seconds that its main thread was ready to compute and had no core.
        pages: how many pages were read for it from a disk or from swap.
        state: of its main thread, as Linux writes it: R, S, D, T, ….
    """

    at: float
    steps: int
    computed: float
    queued: float
    pages: int
    state: str


def usage_of(pid: int, steps: int, at: float) -> Usage | None:
    """That of process ``pid``; ``None`` when it has ended, or its system does not tell."""
    folder = Path(f"/proc/{pid}/task/{pid}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        computed, queued, _ = (folder / "schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return Usage(at, steps, int(computed) / 1e9, int(queued) / 1e9, int(fields[9]), fields[0])


@dataclass(frozen=True)
class _PerStep:
    """What a rank used in each step of a window, in seconds, and pages; ``blocked`` in waits for a disk."""

    computed: float
    queued: float
    blocked: float
    pages: float


def _per_step(window: Sequence[Usage]) -> _PerStep | None:
    first, last = window[0], window[-1]
    steps = last.steps - first.steps
    if steps <= 0:
        return None
    blocked = sum(usage.state == "D" for usage in window) / len(window) * (last.at - first.at)
    return _PerStep(
        (last.computed - first.computed) / steps,
        (last.queued - first.queued) / steps,
        blocked / steps,
        (last.pages - first.pages) / steps,
    )


def cause(own: Sequence[Usage], others: Sequence[Sequence[Usage]], seconds: float) -> str:
    """Why a rank takes ``seconds`` longer for a step than the others, as the rest of a sentence; empty if unknown.

    Args:
        own: what it has used, the oldest first; ``others``: the same of the other ranks.
    """
    if own and own[-1].state in ("T", "t"):
        return "it is stopped (SIGSTOP, or a debugger)"
    mine = _per_step(own) if len(own) > 1 else None
    theirs = [found for window in others if len(window) > 1 and (found := _per_step(window)) is not None]
    if mine is None or not theirs:
        return ""

    def excess(quantity: Callable[[_PerStep], float]) -> float:
        return quantity(mine) - median(map(quantity, theirs))

    pages = excess(lambda used: used.pages)
    reads_pages = f"it waits for pages that are read from a disk or from swap ({pages:.0f} a step): memory is short"
    candidates = {
        "it computes longer": excess(lambda used: used.computed),
        "it waits for a core, which others use": excess(lambda used: used.queued),
        reads_pages if pages >= _PAGES_PER_STEP else "it waits for a disk": excess(lambda used: used.blocked),
    }
    name, most = max(candidates.items(), key=lambda candidate: candidate[1])
    if most >= _EXPLAINED_SHARE * seconds:
        return name
    return "it neither computes nor reads a disk: it sleeps, or waits for a lock, the network or its data"


class Causes:
    """Looks at the processes of a board repeatedly, and says of those that are slow why."""

    def __init__(self, usage: Callable[[int, int, float], Usage | None] = usage_of) -> None:
        self._usage = usage
        self._windows: dict[int, deque[Usage]] = defaultdict(lambda: deque(maxlen=WINDOW_LOOKS))

    def explained(self, standings: Sequence[Standing], at: float) -> list[Standing]:
        """``standings``, those of slow ranks with the cause."""
        for standing in standings:
            used = self._usage(standing.pid, standing.steps, at) if standing.pid else None
            if used is not None:
                self._windows[standing.rank].append(used)
        causes = {
            slow.rank: cause(
                self._windows[slow.rank],
                [window for rank, window in self._windows.items() if rank != slow.rank],
                slow.seconds,
            )
            for slow in stragglers(standings)
        }
        return [replace(standing, cause=causes.get(standing.rank, "")) for standing in standings]
