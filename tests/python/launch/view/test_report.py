from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.view.report import Attempt, write_report
from accelerate_cpp.launch.workers.failure import RunEnd, WorkerEnd

TRACEBACK = "noise\nTraceback (most recent call last):\n  File 'a.py'\nValueError: boom\n"
LOST = "Traceback (most recent call last):\naccelerate_cpp.errors.PeerLost: rank 1 died\n"
ATTEMPT = Attempt(
    0,
    0.0,
    {0: 10, 1: 11},
    RunEnd((WorkerEnd(0, 1, False, 1.5), WorkerEnd(1, -int(signal.SIGKILL), False, 2.0)), None),
    {0: LOST, 1: ""},
)


def test_sentence_names_rank_host_process_and_signal() -> None:
    assert ATTEMPT.sentence() == (
        f"rank 1 (host {socket.gethostname()}, process 11) failed first: killed by SIGKILL (signal 9)"
    )


def test_good_run_has_no_sentence() -> None:
    assert Attempt(0, 0.0, {0: 10}, RunEnd((WorkerEnd(0, 0, False),), None), {0: ""}).sentence() == ""


def test_report_has_every_worker_of_every_attempt(tmp_path: Path) -> None:
    second = Attempt(1, 3.0, {0: 12}, RunEnd((WorkerEnd(0, 1, True),), int(signal.SIGINT)), {0: TRACEBACK})
    write_report(tmp_path / "logs" / "report.json", ("python", "train.py"), [ATTEMPT, second], 130)
    report = json.loads((tmp_path / "logs" / "report.json").read_text())
    assert (report["exit_status"], report["command"]) == (130, ["python", "train.py"])
    first, last = report["attempts"]
    assert first["first_failure"] == 1
    assert first["began"] == "1970-01-01T00:00:00.000+00:00"
    assert first["workers"][1] == {
        "rank": 1,
        "pid": 11,
        "ended": "1970-01-01T00:00:02.000+00:00",
        "exit_code": None,
        "signal": 9,
        "how": "killed by SIGKILL (signal 9)",
        "ended_by_launcher": False,
        "error": None,
        "last_output": "",
    }
    assert first["workers"][0]["error"] == "accelerate_cpp.errors.PeerLost: rank 1 died"
    assert last["interrupted_by"] == "SIGINT"
    assert last["workers"][0]["last_output"].startswith("Traceback")


def test_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(SystemFailure, match=r"the report .*report\.json cannot be written"):
        write_report(tmp_path / "report.json", (), [ATTEMPT], 0)
