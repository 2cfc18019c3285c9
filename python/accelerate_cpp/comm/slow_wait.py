"""The log message about processes that take long to arrive."""

from __future__ import annotations

import logging
import time

from accelerate_cpp.config import env_table


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

    def report(self, awaited: str) -> None:
        """Logs it once, after ``ACCELERATE_CPP_SLOW_WAIT_SECONDS``."""
        if not self._reported and self.seconds > self._threshold:
            self._reported = True
            logging.getLogger("accelerate_cpp.comm").warning("%s until now", self.sentence(awaited))
