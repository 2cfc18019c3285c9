"""The report of a launch for programs: a file in JSON. Only a launch that writes one loads this module."""

from __future__ import annotations

import json
import math
import signal
import socket
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from accelerate_cpp.config.file import replace_text
from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.view.report import Attempt
from accelerate_cpp.launch.workers.failure import WorkerEnd, describe


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
        "attempts": [_attempt(attempt) for attempt in attempts],
    }
    try:
        replace_text(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise SystemFailure(error.errno or 0, f"the report {path} cannot be written: {error.strerror}") from error


def _attempt(attempt: Attempt) -> dict[str, Any]:
    failure, interrupt = attempt.failure, attempt.end.interrupted_by
    return {
        "attempt": attempt.number,
        "began": _time(attempt.began),
        "interrupted_by": None if interrupt is None else signal.Signals(interrupt).name,
        "first_failure": None if failure is None else failure.rank,
        "workers": [_worker(attempt, end) for end in sorted(attempt.end.workers, key=lambda end: end.rank)],
    }


def _worker(attempt: Attempt, end: WorkerEnd) -> dict[str, Any]:
    output = attempt.outputs[end.rank]
    progress: dict[str, Any] = {}
    if standing := attempt.standings.get(end.rank):
        progress = {"steps": standing.steps, "loss": None if math.isnan(standing.loss) else standing.loss}
    return {
        "rank": end.rank,
        "pid": attempt.pids[end.rank],
        "ended": _time(end.at),
        "exit_code": end.exit_code if end.exit_code >= 0 else None,
        "signal": None if end.exit_code >= 0 else -end.exit_code,
        "how": describe(end.exit_code),
        "ended_by_launcher": end.while_ending,
        "error": output.error or None,
        "last_output": output.traceback if end.exit_code != 0 else None,
        **progress,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")
