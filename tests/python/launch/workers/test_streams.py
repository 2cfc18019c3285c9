from __future__ import annotations

import os
from pathlib import Path

import pytest

from accelerate_cpp.errors import InvalidArgument, SystemFailure
from accelerate_cpp.launch.workers import streams as streams_module
from accelerate_cpp.launch.workers.error_report import ErrorReport, LastOutput
from accelerate_cpp.launch.workers.program import STDERR, STDOUT
from accelerate_cpp.launch.workers.streams import Logs, Streams, parse_tee
from accelerate_cpp.runtime.progress_board import Standing


def test_tee_is_one_number_or_one_per_worker() -> None:
    assert parse_tee("3", 2) == (3, 3)
    assert parse_tee("0:3,2:1", 3) == (3, 0, 1)


@pytest.mark.parametrize("text", ["4", "-1", "x", "0:4", "2:1", "0:", ":1", ""])
def test_tee_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected 0"):
        parse_tee(text, 2)


def test_standard_output_is_left_to_the_workers_and_standard_error_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with Streams(Logs(), 0, [0]) as streams:
        sinks = streams.of(0)
        assert sinks.keys() == {STDERR}
        sinks[STDERR](b"oops\n")
        assert streams.last_output(0) == LastOutput("oops\n")
    assert capfd.readouterr().err == "oops\n"


def test_report_of_a_worker_is_kept_and_joins_its_log_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = ErrorReport("ValueError: boom", "Traceback: boom", None)
    with Streams(Logs(tmp_path, (STDERR, STDERR)), 0, [4, 5]) as streams:
        streams.of(0)[STDERR](b"before\n")
        streams.of(1)
        descriptor = int(streams.environment(0)["ACCELERATE_CPP_ERROR_REPORT"].partition(":")[0])
        assert descriptor in streams.inherited
        os.write(descriptor, report.render())
        assert streams.last_output(4) == LastOutput("before\n", report)
        assert streams.last_output(5) == LastOutput("")
    logs = tmp_path / "attempt_0"
    assert (logs / "4" / "stderr.log").read_text() == "before\nTraceback: boom\n"
    assert (logs / "5" / "stderr.log").read_text() == ""
    assert "boom" not in capfd.readouterr().err


def test_asked_for_streams_are_shown_with_ranks_and_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Streams(Logs(tmp_path, (STDOUT, 0)), 1, [4, 5]) as streams:
        assert streams.of(1).keys() == {STDERR}
        streams.of(0)[STDOUT](b"hello\n")
        for console in streams.consoles:
            console.show_all()
    assert capfd.readouterr().out == "[4] hello\n"
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.log")] == [Path("attempt_1/4/stdout.log")]
    assert (tmp_path / "attempt_1/4/stdout.log").read_text() == "hello\n"


def test_without_a_folder_streams_are_only_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with Streams(Logs(None, (STDOUT, STDOUT)), 0, [0, 1]) as streams:
        streams.of(1)[STDOUT](b"hello\n")
        streams.of(0)[STDOUT](b"hello\n")
    assert capfd.readouterr().out == "[×2] hello\n"


def test_lost_output_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stderr.log").symlink_to("/dev/full")
    monkeypatch.setattr(streams_module.socket, "gethostname", lambda: "here")
    with Streams(Logs(tmp_path, (STDERR,)), 0, [0]) as streams:
        streams.of(0)[STDERR](b"oops\n")
        assert streams.has_lost_output
    assert "accelerate-cpp launch on here: " in capfd.readouterr().err


def test_log_of_a_monitored_run_is_on_standard_error_and_leaves_standard_output_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    standing = Standing(0, steps=3, loss=1.0, resident_bytes=5 << 20)
    with Streams(Logs(), 0, [0, 1], monitor=True) as streams:
        assert streams.of(1).keys() == {STDERR}
        assert streams.environment(1).keys() == {"ACCELERATE_CPP_ERROR_REPORT"}
        streams.of(0)[STDERR](b"before\n")
        streams.progress()([standing], 0, False)
    assert capfd.readouterr().err == "before\naccelerate-cpp: step 3, 0 steps/s, loss 1, memory up to 5 MiB\n"


def test_the_folder_of_a_run_is_made_by_it_alone(tmp_path: Path) -> None:
    """Whoever made it before could have put links at the places of its files."""
    logs = Logs(tmp_path / "logs" / "run", (STDERR,))
    logs.make_folder()
    assert (tmp_path / "logs" / "run").is_dir()
    with pytest.raises(SystemFailure, match="File exists: the output of the workers cannot be written there"):
        logs.make_folder()
    Logs().make_folder()
