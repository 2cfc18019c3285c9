"""Which worker failed first, and how that is said."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from accelerate_cpp.errors import AccelerateError


class WorkerFailed(AccelerateError):
    """A worker of a launch raised or died; ``rank`` and ``exit_code`` (negative: a signal) are the first one's."""

    def __init__(self, message: str, rank: int = 0, exit_code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


@dataclass(frozen=True)
class WorkerEnd:
    """How a worker ended.

    Attributes:
        exit_code: negative for a signal.
        while_ending: whether the launcher was ending the run by then.
        at: seconds since the epoch.
    """

    rank: int
    exit_code: int
    while_ending: bool
    at: float = field(default=0.0, compare=False)


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: its workers in the order of their ends, and the signal that interrupted the launcher, if any."""

    workers: tuple[WorkerEnd, ...]
    interrupted_by: int | None


def first_failure(ends: Sequence[WorkerEnd], lost_a_peer: Callable[[int], bool]) -> WorkerEnd | None:
    """The failure that caused the others, or ``None`` if every worker ended well.

    A worker that the launcher ended, or whose error says that it lost a peer (``lost_a_peer(rank)``), is a consequence;
    it is named only when there is nothing else to name.
    """
    failures = [end for end in ends if end.exit_code != 0]
    own = [end for end in failures if not end.while_ending]
    causes = [end for end in own if not lost_a_peer(end.rank)]
    return next(iter(causes or own or failures), None)


def describe(exit_code: int) -> str:
    """``exit code 1``, or ``killed by SIGKILL (signal 9)`` for a negative code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name} (signal {-exit_code})"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {-exit_code}"


def shell_status(exit_code: int) -> int:
    """The exit status that says the same of another process: 128 + n for signal n."""
    return exit_code if exit_code >= 0 else 128 - exit_code
