from __future__ import annotations

import json
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.view.report import Attempt
from accelerate_cpp.launch.view.report_file import write_report
from accelerate_cpp.launch.workers.error_report import ErrorReport, LastOutput
from accelerate_cpp.launch.workers.failure import RunEnd, WorkerEnd
from accelerate_cpp.runtime.progress_board import Standing

TRACEBACK = "noise\nTraceback (most recent call last):\n  File 'a.py'\nValueError: boom\n"
LOST = "Traceback (most recent call last):\naccelerate_cpp.errors.PeerLost: rank 1 died\n"
ATTEMPT = Attempt(
    0,
    0.0,
    {0: 10, 1: 11},
    RunEnd((WorkerEnd(0, 1, False, 1.5), WorkerEnd(1, -int(signal.SIGKILL), False, 2.0)), None),
    {0: LastOutput(LOST), 1: LastOutput("")},
)


@pytest.mark.parametrize(("savers", "is_saved"), [((0, 1), True), ((0,), False), ((), False)])
def test_a_run_has_saved_only_if_all_its_workers_had_said_so(savers: tuple[int, ...], is_saved: bool) -> None:
    end = RunEnd((WorkerEnd(0, 75, False), WorkerEnd(1, 75, False)), 15, savers=savers)
    attempt = Attempt(0, 0.0, {0: 10, 1: 11}, end, {0: LastOutput(""), 1: LastOutput("")})
    assert attempt.is_saved == is_saved
    assert ("has saved its state" in attempt.sentence()) == is_saved
    assert (attempt.failure is None) == is_saved


def test_sentence_names_rank_host_process_and_signal() -> None:
    assert ATTEMPT.sentence() == (
        f"rank 1 (host {socket.gethostname()}, process 11) failed first: killed by SIGKILL (signal 9)"
    )


def test_sentence_names_the_cause_among_the_ranks_of_another_launcher() -> None:
    ends = RunEnd((WorkerEnd(1, 1, False), WorkerEnd(0, 1, False)), None)
    attempt = replace(ATTEMPT, end=ends, outputs={0: _blames(0, 2, 3), 1: _blames(0, 1)})
    assert attempt.sentence() == (
        f"rank 0 (host {socket.gethostname()}, process 10) failed first: exit code 1 "
        "because of ranks 2-3, which another launcher has started"
    )
    assert "another launcher" not in replace(attempt, outputs={0: _blames(0, 1), 1: _blames(0)}).sentence()


def _blames(*ranks: int) -> LastOutput:
    return LastOutput("", ErrorReport("PeerLost: lost", "trace", ranks))


def test_good_run_has_no_sentence() -> None:
    assert Attempt(0, 0.0, {0: 10}, RunEnd((WorkerEnd(0, 0, False),), None), {0: LastOutput("")}).sentence() == ""


def _attempt(*errors: str | None, interrupted_by: int | None = None) -> Attempt:
    """One in which rank i has raised ``errors[i]``, as its report says; ``None`` is a rank that printed a traceback."""
    outputs = {
        rank: LastOutput(TRACEBACK)
        if error is None
        else LastOutput("", ErrorReport(error, f"trace of rank {rank}\n{error}", (1,) if "PeerLost" in error else None))
        for rank, error in enumerate(errors)
    }
    ends = tuple(WorkerEnd(rank, 1, False) for rank in outputs)
    return Attempt(0, 0.0, dict.fromkeys(outputs, 10), RunEnd(ends, interrupted_by), outputs)


def test_error_of_the_first_failure_is_shown_in_full_and_last() -> None:
    lost = "accelerate_cpp.errors.PeerLost: rank 1 died"
    assert _attempt(lost, "ValueError: boom", lost, "KeyError: 3").errors() == (
        f"ranks 0,2: {lost}\nrank 3: KeyError: 3\ntrace of rank 1\nValueError: boom"
    )


def test_error_of_several_ranks_is_shown_once() -> None:
    assert _attempt("E: a", "E: a", "E: a").errors() == "ranks 1-2 failed with the same error:\ntrace of rank 0\nE: a"
    assert _attempt("E: a", "E: a").errors() == "rank 1 failed with the same error:\ntrace of rank 0\nE: a"


def test_traceback_that_a_worker_has_printed_is_repeated_where_others_may_have_hidden_it() -> None:
    several, alone = _attempt(None, "PeerLost: rank 0"), _attempt(None)
    assert several.errors() == "rank 1: PeerLost: rank 0\n" + TRACEBACK.removeprefix("noise\n").rstrip()
    assert several.errors(again=False) == alone.errors() == ""


def test_place_of_an_interrupted_run_is_shown_by_one_rank() -> None:
    stopped = int(signal.SIGINT)
    shown = "rank 1 was interrupted here:\ntrace of rank 1\nKeyboardInterrupt"
    assert _attempt(None, "KeyboardInterrupt", interrupted_by=stopped).errors() == shown
    assert _attempt(None, None, interrupted_by=stopped).errors() == ""


def test_error_of_those_that_waited_is_shown_in_full_where_the_first_has_left_in_good_order() -> None:
    waiting = _attempt("accelerate_cpp.errors.PeerLost: rank 1 has ended", "E: replaced")
    ends = (WorkerEnd(1, 0, False), WorkerEnd(0, 1, False))
    left = replace(waiting, end=RunEnd(ends, None), outputs=waiting.outputs | {1: LastOutput("")})
    assert left.failure is not None
    assert left.failure.rank == 1
    assert left.errors() == "trace of rank 0\naccelerate_cpp.errors.PeerLost: rank 1 has ended"
    silent = replace(left, outputs={0: LastOutput(""), 1: LastOutput("")})
    assert silent.errors() == ""


def test_report_has_every_worker_of_every_attempt(tmp_path: Path) -> None:
    second = Attempt(1, 3.0, {0: 12}, RunEnd((WorkerEnd(0, 1, True),), int(signal.SIGINT)), {0: LastOutput(TRACEBACK)})
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


def test_report_of_a_monitored_run_has_steps_and_losses(tmp_path: Path) -> None:
    standings = {0: Standing(0, steps=300, loss=299.0), 1: Standing(1, steps=299)}
    write_report(tmp_path / "report.json", (), [replace(ATTEMPT, standings=standings)], 1)
    workers = json.loads((tmp_path / "report.json").read_text())["attempts"][0]["workers"]
    assert [(worker["steps"], worker["loss"]) for worker in workers] == [(300, 299.0), (299, None)]


def test_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(SystemFailure, match=r"the report .*report\.json cannot be written"):
        write_report(tmp_path / "report.json", (), [ATTEMPT], 0)
