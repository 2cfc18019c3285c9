"""How an attempt at a run ended, as sentences for the terminal."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from accelerate_cpp.launch.workers.error_report import LastOutput
from accelerate_cpp.launch.workers.failure import RunEnd, WorkerEnd, account, first_failure, named
from accelerate_cpp.runtime.preemption import REQUEUE
from accelerate_cpp.runtime.progress_board import Standing

_SAVED = f"the run has saved its state and left, to be started again (exit code {REQUEUE})"


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run.

    Attributes:
        began: seconds since the epoch.
        pids: of the workers, by rank.
        outputs: what they have left of the errors that ended them, by rank.
        standings: how far they came, by rank; empty unless the run was monitored.
    """

    number: int
    began: float
    pids: Mapping[int, int]
    end: RunEnd
    outputs: Mapping[int, LastOutput]
    standings: Mapping[int, Standing] = field(default_factory=dict)

    @property
    def failure(self) -> WorkerEnd | None:
        """The worker whose end caused those of the others; ``None`` if every worker ended well."""
        return None if self.is_saved else first_failure(self.end, lambda rank: self.outputs[rank].blames)

    @property
    def is_saved(self) -> bool:
        """Whether all workers have saved their state and left, to be started again."""
        return all(map(self.end.has_saved, self.end.workers))

    @property
    def is_finished(self) -> bool:
        """Whether all workers ended well, none because it was told to end: those that would save then have not."""
        return all(
            end.exit_code == 0 and (not end.while_ending or end.rank in self.end.savers) for end in self.end.workers
        )

    def sentence(self) -> str:
        """The worker that failed or left first, with place and cause; empty if none did."""
        failure = self.failure
        if failure is None:
            return _SAVED if self.is_saved else ""
        where = place_of(failure.rank, self.pids[failure.rank])
        return f"{where} {account(failure, self.end)}{self._elsewhere(failure)}"

    def _elsewhere(self, failure: WorkerEnd) -> str:
        """The ranks of other launchers that its error names as its cause, where it names none of this one."""
        blamed = {*(self.outputs[failure.rank].blames or ())} - {failure.rank}
        if failure.while_ending or not blamed or not blamed.isdisjoint(self.pids):
            return ""
        return f" because of {named(sorted(blamed))}, which another launcher has started"

    def errors(self, again: bool = True) -> str:
        """The errors that ended workers, with the traceback of the first failure last; empty if none is to be shown.

        Other ranks have a line each, or one for all that say the same.

        Args:
            again: of several workers, show the last traceback of the first failure also where it has been shown, as
                the worker has printed it and left no report.
        """
        failed = [end.rank for end in self.end.workers if end.exit_code != 0 and not self.end.has_saved(end)]
        reports = {rank: report for rank in sorted(failed) if (report := self.outputs[rank].report) is not None}
        first = self.failure.rank if self.failure is not None else None
        if first not in reports and (self.end.interrupted_by is not None or self._has_left(first)):
            was_told = None if self.end.interrupted_by is not None else first
            first = next(iter(reports), was_told)  # it shows where the run was
        if first is None or (first not in reports and (len(self.pids) == 1 or not again)):
            return ""
        ranks_by_error: dict[str, list[int]] = {}
        for rank, report in reports.items():
            if rank != first:
                ranks_by_error.setdefault(report.headline, []).append(rank)
        same = ranks_by_error.pop(self.outputs[first].error, [])
        lines = [f"{named(ranks)}: {error}" for error, ranks in ranks_by_error.items()]
        if self.end.interrupted_by is not None:
            lines.append(f"rank {first} was interrupted here:")
        elif same:
            lines.append(f"{named(same)} failed with the same error:")
        return "\n".join(filter(None, [*lines, self.outputs[first].traceback]))

    def _has_left(self, rank: int | None) -> bool:
        return any(end.rank == rank and end.exit_code == 0 for end in self.end.workers)


def place_of(rank: int, pid: int) -> str:
    """A worker of this machine as sentences name it: ``rank 1 (host a, process 7)``."""
    return f"rank {rank} (host {socket.gethostname()}, process {pid})"
