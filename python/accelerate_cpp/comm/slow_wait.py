"""The sentence in the log about processes that take long to come."""

from __future__ import annotations

import logging
import time

from accelerate_cpp.config import env_table


class SlowWait:
    """A wait of ``rank`` while a group of ``world_size`` ranks is formed; the log tells of it once if it is long."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._subject = f"forming a group of {world_size} ranks: rank {rank}"
        self._started, self._threshold = time.monotonic(), env_table.SLOW_WAIT_SECONDS.get()
        self._reported = self._threshold == 0

    @property
    def seconds(self) -> float:
        """How long it has lasted."""
        return time.monotonic() - self._started

    def sentence(self, awaited: str) -> str:
        """Who has waited for how long, and for whom: ``awaited``."""
        return f"{self._subject} waited {self.seconds:.0f} s for {awaited}"

    def report(self, awaited: str) -> None:
        """Says so in the log, after ``ACCELERATE_CPP_SLOW_WAIT_SECONDS``, the first time."""
        if not self._reported and self.seconds > self._threshold:
            self._reported = True
            logging.getLogger("accelerate_cpp.comm").warning("%s until now", self.sentence(awaited))
