"""The events of a launch, as sentences for the terminal and as JSON for programs."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accelerate_cpp.config.file import replace_text
from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.workers.failure import RunEnd, WorkerEnd, account, describe, first_failure
from accelerate_cpp.launch.workers.worker_output import blamed_ranks, last_error_line, last_traceback


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run.

    Attributes:
        began: seconds since the epoch.
        pids: of the workers, by rank.
        tails: the ends of their standard errors, by rank.
    """

    number: int
    began: float
    pids: Mapping[int, int]
    end: RunEnd
    tails: Mapping[int, str]

    @property
    def failure(self) -> WorkerEnd | None:
        """The worker whose end caused those of the others; ``None`` if every worker ended well."""
        return first_failure(self.end, lambda rank: blamed_ranks(self.tails[rank]))

    def sentence(self) -> str:
        """The worker that failed or left first, with place and cause; empty if none did."""
        failure = self.failure
        if failure is None:
            return ""
        where = f"rank {failure.rank} (host {socket.gethostname()}, process {self.pids[failure.rank]})"
        return f"{where} {account(failure, self.end)}"

    def as_data(self) -> dict[str, Any]:
        """The attempt for JSON."""
        failure = self.failure
        return {
            "attempt": self.number,
            "began": _time(self.began),
            "interrupted_by": None if self.end.interrupted_by is None else signal.Signals(self.end.interrupted_by).name,
            "first_failure": None if failure is None else failure.rank,
            "workers": [self._worker(end) for end in sorted(self.end.workers, key=lambda end: end.rank)],
        }

    def _worker(self, end: WorkerEnd) -> dict[str, Any]:
        tail = self.tails[end.rank]
        return {
            "rank": end.rank,
            "pid": self.pids[end.rank],
            "ended": _time(end.at),
            "exit_code": end.exit_code if end.exit_code >= 0 else None,
            "signal": None if end.exit_code >= 0 else -end.exit_code,
            "how": describe(end.exit_code),
            "ended_by_launcher": end.while_ending,
            "error": last_error_line(tail) or None,
            "last_output": last_traceback(tail) if end.exit_code != 0 else None,
        }


def write_report(path: Path, command: Sequence[str], attempts: Sequence[Attempt], status: int) -> None:
    """Writes what happened as JSON, in one step.

    Raises:
        SystemFailure: the file cannot be written.
    """
    report = {
        "host": socket.gethostname(),
        "command": list(command),
        "exit_status": status,
        "written": _time(datetime.now(timezone.utc).timestamp()),
        "attempts": [attempt.as_data() for attempt in attempts],
    }
    try:
        replace_text(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise SystemFailure(error.errno or 0, f"the report {path} cannot be written: {error.strerror}") from error


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
