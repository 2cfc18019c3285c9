"""Waits for processes that take long to arrive, and the log message about them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import Timeout

_FIRST_PAUSE_SECONDS = 0.001


class SlowWait:
    """A wait of ``rank`` while a group of ``world_size`` ranks is formed; if it is long, it is logged once."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._subject = f"forming a group of {world_size} ranks: rank {rank}"
        self._started, self._threshold = time.monotonic(), env_table.SLOW_WAIT_SECONDS.get()
        self._reported = self._threshold == 0

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._started

    def sentence(self, awaited: str) -> str:
        """The rank that has waited, for how long, and for which rank (``awaited``)."""
        return f"{self._subject} waited {self.seconds:.0f} s for {awaited}"

    def report(self, awaited: str | Callable[[], str]) -> None:
        """Logs it once, after ``ACCELERATE_CPP_SLOW_WAIT_SECONDS``; a function is asked only then."""
        if not self._reported and self.seconds > self._threshold:
            self._reported = True
            logging.getLogger("accelerate_cpp.comm").warning("%s until now", self.sentence(_said(awaited)))


def _said(awaited: str | Callable[[], str]) -> str:
    return awaited if isinstance(awaited, str) else awaited()


class JoiningWait(SlowWait):
    """A wait for the processes of a run, in pauses that become longer, up to ``longest_pause`` seconds."""

    def __init__(self, rank: int, world_size: int, timeout: timedelta, longest_pause: float) -> None:
        super().__init__(rank, world_size)
        self._timeout, self._longest_pause, self._pause = timeout.total_seconds(), longest_pause, _FIRST_PAUSE_SECONDS

    def pause(self, awaited: str | Callable[[], str], advice: str) -> None:
        """Waits for ``awaited``, or for what it returns, and reports it.

        Raises:
            Timeout: for too long already; with ``advice``.
        """
        self.report(awaited)
        if self.seconds > self._timeout:
            raise Timeout(
                f"the processes of this run did not all join within {self._timeout:g} s: "
                f"waited for {_said(awaited)}; {advice}"
            )
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, self._longest_pause)
