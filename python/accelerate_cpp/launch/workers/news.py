"""What a launcher tells of a run that has not ended: that it fails, and why, and that a worker is stopped.

The workers of a failing run may take long to end: they clean up, or wait for one another. Whoever looks at the terminal
learns the cause all the same, a moment after the first sign of it; how the run ended is told at its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accelerate_cpp.launch.workers.failure import Blames, RunEnd, account, describe, first_failure

NEWS_SECONDS = 1.25
"""How long a run that fails may take to end before its cause is told: a moment more than workers get to end on their
own, as most have ended then, and the launcher tells all."""
LOOK_SECONDS = 1.0
"""How often is looked whether a worker is stopped: the system does not tell."""


@dataclass(frozen=True)
class Voice:
    """How a launcher speaks of its workers while they run.

    Attributes:
        say: shows a sentence.
        name: what a worker is called, such as ``rank 1 (host a, process 7)``.
        error: the line with type and message of the error that ends a worker; empty as long as it has reported none.
        first_rank: of the launcher, where its workers are numbered from 0.
    """

    say: Callable[[str], object]
    name: Callable[[int], str]
    error: Callable[[int], str]
    first_rank: int = 0


class News:
    """Tells once that a run fails, if that takes :data:`NEWS_SECONDS`, and each time that a worker is stopped.

    Args:
        so_far: how the run ends as far as is known; ``None`` while nothing says that it fails.
        stopped: of each worker that runs, whether a signal has stopped it; empty once they have been told to end.
        blames: returns the ranks that the error of a worker names as its cause.
    """

    def __init__(
        self,
        voice: Voice,
        so_far: Callable[[], RunEnd | None],
        stopped: Callable[[], Mapping[int, bool]],
        blames: Blames,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._voice, self._so_far, self._stopped, self._blames, self._clock = voice, so_far, stopped, blames, clock
        self._failure_due: float | None = None
        self._is_told = False
        self._look_due = clock() + LOOK_SECONDS
        self._known_stopped: set[int] = set()

    def seconds_left(self) -> float:
        """How long until :meth:`show_due` has something to do."""
        if self._failure_due is None and not self._is_told and self._so_far() is not None:
            self._failure_due = self._clock() + NEWS_SECONDS
        due = self._look_due if self._failure_due is None else min(self._look_due, self._failure_due)
        return max(0.0, due - self._clock())

    def show_due(self) -> None:
        """Tells what is due."""
        now = self._clock()
        if self._look_due <= now:
            self._look_due = now + LOOK_SECONDS
            self._tell_stopped()
        if self._failure_due is not None and self._failure_due <= now:
            self._failure_due = None
            self._is_told = self._tell_failure()

    def show_all(self) -> None:
        """Nothing is left to tell: the run has ended."""

    def _tell_stopped(self) -> None:
        running = self._stopped()
        stopped = {rank for rank, is_stopped in running.items() if is_stopped}
        for rank in sorted(stopped - self._known_stopped):
            self._voice.say(f"{self._voice.name(rank)} is stopped by a signal; it goes on when it gets SIGCONT")
        for rank in sorted((self._known_stopped - stopped) & running.keys()):
            self._voice.say(f"{self._voice.name(rank)} is not stopped any more")
        self._known_stopped = stopped

    def _tell_failure(self) -> bool:
        """Returns whether there was a cause to tell."""
        run = self._so_far()
        failure = None if run is None else first_failure(run, self._blames)
        if run is None or failure is None:
            return False
        error = self._voice.error(failure.rank)
        if failure.exit_code < 0:
            what = f"was {describe(failure.exit_code)}"
        elif failure.exit_code > 0:
            what = f"failed: {error or describe(failure.exit_code)}"
        else:
            what = account(failure, run, self._voice.first_rank)
        self._voice.say(f"{self._voice.name(failure.rank)} {what}; the processes are ending")
        return True
