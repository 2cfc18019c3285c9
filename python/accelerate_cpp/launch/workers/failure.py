"""Which worker failed first, and how that is described."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from accelerate_cpp.config.env_table import render_cores as ranges
from accelerate_cpp.errors import AccelerateError
from accelerate_cpp.launch.workers.attendance import Absence
from accelerate_cpp.runtime.preemption import REQUEUE

Blames = Callable[[int], Collection[int] | None]
"""The ranks that a worker's error names as its cause: empty if it only says that there is one; ``None``: none."""


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
    """How a run ended.

    Attributes:
        workers: in the order of their ends.
        interrupted_by: the signal that interrupted the run, if any; ``None`` also if it had failed before.
        is_signalled: whether a signal to the launcher has asked it to end, also after a failure.
        is_last: whether that, or the end of its lifeline, has, so that no other attempt follows.
        absence: the worker that ended well before it joined the group of those that waited for it, if any.
        stopped: the workers that lived, but were stopped by a signal or a debugger, when the launcher ended them.
        savers: the workers that had said that they save their state when they are told to end.
    """

    workers: tuple[WorkerEnd, ...]
    interrupted_by: int | None
    absence: Absence | None = None
    stopped: Collection[int] = ()
    is_signalled: bool = False
    is_last: bool = False
    savers: Collection[int] = ()

    def has_saved(self, end: WorkerEnd) -> bool:
        """Whether a worker has left after it saved the state of the run."""
        return end.exit_code == REQUEUE and end.rank in self.savers


def first_failure(run: RunEnd, blames: Blames) -> WorkerEnd | None:
    """The end that caused the others, or ``None`` if every worker ended well.

    A worker that the launcher ended, or whose error blames others, is a consequence; it is named only when there is
    nothing else to name. A worker that ended well is the cause if others waited for it in vain to join their group,
    or if all errors are consequences and blame it, or blame no rank by name; one that the launcher ended is, if they
    blame it and nobody else that ended. Where the cause is on another machine, a worker is named whose error says so.
    """
    if run.absence is not None:
        return next(end for end in run.workers if end.rank == run.absence.worker)
    failures = [end for end in run.workers if end.exit_code != 0 and not run.has_saved(end)]
    own = [end for end in failures if not end.while_ending]
    blamed = {end.rank: blames(end.rank) for end in own}
    causes = [end for end in own if blamed[end.rank] is None]
    named = {rank for ranks in blamed.values() for rank in ranks or ()}
    left = [end for end in run.workers if end.exit_code == 0 and not end.while_ending]
    if named or not own:
        left = [end for end in left if end.rank in named]
    return next(
        iter(causes or left or _held_up(run, blamed) or _hit_from_elsewhere(run, blamed) or own or failures), None
    )


def _held_up(run: RunEnd, blamed: Mapping[int, Collection[int] | None]) -> list[WorkerEnd]:
    """The workers that errors blame and that lived on until the launcher ended them; those first that were stopped."""
    named = {rank for ranks in blamed.values() for rank in ranks or ()}
    held_up = [end for end in run.workers if end.while_ending and end.rank in named]
    return sorted(held_up, key=lambda end: end.rank not in run.stopped)


def _hit_from_elsewhere(run: RunEnd, blamed: Mapping[int, Collection[int] | None]) -> list[WorkerEnd]:
    """The workers whose errors blame ranks of other machines, and none of this one."""
    here = {end.rank for end in run.workers}
    others = {end.rank: {*(blamed.get(end.rank) or ())} - {end.rank} for end in run.workers}
    return [end for end in run.workers if others[end.rank] and others[end.rank].isdisjoint(here)]


def account(failure: WorkerEnd, run: RunEnd, first_rank: int = 0) -> str:
    """The description of the :func:`first_failure` of a run: ``failed first: exit code 1``.

    Args:
        first_rank: of the launcher, where its workers are numbered from 0.
    """
    if failure.while_ending and any(not end.while_ending and end.exit_code != 0 for end in run.workers):
        state = "was stopped by a signal or a debugger" if failure.rank in run.stopped else "still ran"
        return f"did not answer: it {state} when others had waited for it in vain"
    if failure.exit_code != 0:
        return f"failed first: {describe(failure.exit_code)}"
    if run.absence is None:
        return "left first: it ended with exit code 0 while others still needed it"
    by = named([first_rank + worker for worker in run.absence.waiting])
    return f"left first: it ended with exit code 0 before it joined the process group, where {by} waited for it"


def named(ranks: Collection[int]) -> str:
    """``rank 1``, or ``ranks 0,2-7``."""
    return f"rank {ranges(ranks)}" if len(ranks) == 1 else f"ranks {ranges(ranks)}"


def describe(exit_code: int) -> str:
    """``exit code 1``, or ``killed by SIGKILL (signal 9)`` for a negative code."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name} (signal {-exit_code})"
    except ValueError:  # real-time signals have no name
        return f"killed by signal {-exit_code}"


def shell_status(exit_code: int) -> int:
    """The equivalent exit status of another process: 128 + n for signal n."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def failed_status(failure: WorkerEnd) -> int:
    """The exit status of a launch that ended by ``failure``: never 0, also where a worker left or did not answer."""
    if failure.while_ending:
        return 1  # how the launcher ended it says nothing about the run
    return shell_status(failure.exit_code) or 1
