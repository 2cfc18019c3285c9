"""Signals for workers that may not be ready for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

HELD_SECONDS = 60.0
"""How long a worker gets to be ready for a signal: it imports torch, or the run has just been started again."""
_LOOK_SECONDS = 0.2


class Notices:
    """Hands a signal on to each worker when that catches or ignores it: by default it would end it.

    A worker that does neither for :data:`HELD_SECONDS` gets it all the same. Workers that take the place of others get
    what those had heard: a notice is for the run.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[tuple[int, int], float] = {}
        self._heard: set[int] = set()

    def add(self, number: int, pids: Iterable[int]) -> None:
        """Processes ``pids``, which are not reaped before this object is used no more, get signal ``number``."""
        for pid in pids:
            self._held.setdefault((pid, number), self._clock() + HELD_SECONDS)
        self.show_due()

    def renew(self, pids: Iterable[int]) -> None:
        """What came in an earlier attempt at the run is for processes ``pids``, unless it ended who was not ready."""
        numbers = {number for _, number in self._held} | self._heard
        self._held.clear()
        for number in numbers:
            self.add(number, pids)

    def seconds_left(self) -> float | None:
        """How long until :meth:`show_due` has something to do; ``None`` when nothing waits."""
        return _LOOK_SECONDS if self._held else None

    def show_due(self) -> None:
        """Hands on what is due."""
        for (pid, number), due in list(self._held.items()):
            is_ready = _is_ready(pid, number)
            if is_ready or self._clock() >= due:
                del self._held[pid, number]
                os.kill(pid, number)
                if is_ready:
                    self._heard.add(number)

    def show_all(self) -> None:
        """Nothing: a run that ends needs no notice."""


def _is_ready(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:  # no /proc
        return True
    fields = dict(line.split(":", 1) for line in lines if line.startswith(("SigIgn", "SigCgt")))
    return any(int(mask, 16) >> (signal.Signals(number) - 1) & 1 for mask in fields.values())
