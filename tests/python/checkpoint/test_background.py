"""The thread that writes."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from accelerate_cpp.checkpoint.background import BackgroundWriter


def test_a_job_runs_beside_the_caller_and_is_waited_for() -> None:
    writer, go, done = BackgroundWriter(), threading.Event(), []
    writer.start(lambda: done.append(go.wait(60)))
    assert done == []
    go.set()
    writer.wait()
    assert done == [True]
    writer.wait()


def fail() -> None:
    raise OSError("disk full")


def test_an_error_is_logged_and_raised_once_by_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter()
    with caplog.at_level(logging.ERROR):
        writer.start(fail)
        with pytest.raises(OSError, match="disk full"):
            writer.start(lambda: None)
    assert "disk full" in caplog.text
    writer.wait()


def test_where_no_thread_starts_the_caller_does_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    writer, done = BackgroundWriter(), []
    monkeypatch.setattr(threading.Thread, "start", refuses)
    writer.start(lambda: done.append(threading.current_thread()))
    writer.wait()
    assert done == [threading.main_thread()]
    writer.start(fail)
    with pytest.raises(OSError, match="disk full"):
        writer.wait()


def test_the_interpreter_waits_for_the_job() -> None:
    program = """
import sys, threading
from accelerate_cpp.checkpoint.background import BackgroundWriter
def job():
    threading.main_thread().join()
    print("written")
BackgroundWriter().start(job)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "written\n", done.stderr
