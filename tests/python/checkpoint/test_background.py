"""The thread that writes."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate_cpp.checkpoint.background import BackgroundWriter, await_writers


def ended(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


def test_a_job_runs_beside_the_caller_and_is_waited_for() -> None:
    writer, go, done = BackgroundWriter(), threading.Event(), []
    writer.start(lambda: done.append(go.wait(60)))
    assert done == []
    go.set()
    writer.wait()
    assert done == [True]
    writer.wait()


def test_an_error_does_not_keep_what_was_to_be_written() -> None:
    class Copy:
        pass

    def write(copied: Copy) -> None:
        raise OSError(f"disk full: {copied}")

    writer, copied = BackgroundWriter(), Copy()
    gone = weakref.ref(copied)
    writer.start(functools.partial(write, copied))
    writer.join()
    del copied
    assert gone() is None
    with pytest.raises(OSError, match="disk full"):
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
    done = ended(program)
    assert done.stdout == "written\n", done.stderr


FAILS = """
import atexit, sys
from accelerate_cpp.checkpoint.background import BackgroundWriter
def job():
    raise OSError("disk full")
atexit.register(print, "a handler of the program")
writer = BackgroundWriter()
writer.start(job)
"""


# Ctrl-C ends the interpreter's wait for threads, and the job fails only then.
INTERRUPTED = """
import threading, time
def interrupt():
    raise KeyboardInterrupt
threading._shutdown = interrupt
go = threading.Event()
atexit.register(go.set)
def job_that_lasts():
    go.wait()
    time.sleep(0.2)
    job()
try: writer.wait()
except OSError: writer.start(job_that_lasts)
"""


@pytest.mark.parametrize(
    ("last", "status", "shown"),
    [
        ("", 1, True),
        ("sys.exit(0)", 1, True),
        ("sys.exit(3)", 3, True),
        ("1 / 0", 1, False),
        ("try: writer.wait()\nexcept OSError: pass", 0, False),
        ("sys.excepthook = lambda *_: sys.exit(0)", 1, False),
        pytest.param("sys.last_value = KeyError('of a prompt')", 1, False, marks=pytest.mark.long),
        (INTERRUPTED, 1, True),
    ],
)
def test_a_program_ends_with_the_error_that_no_call_has_raised(last: str, status: int, shown: bool) -> None:
    done = ended(FAILS + last)
    assert done.returncode == status, done.stderr
    assert done.stdout == "a handler of the program\n"
    assert ("in job\n" in done.stderr) == shown
    assert done.stderr.endswith("OSError: disk full\n") == shown


def test_an_error_is_that_of_its_process_not_of_its_forks() -> None:
    fork = "import os\nwriter.join()\nif os.fork() == 0: sys.exit(0)\nprint(os.wait()[1])"
    done = ended(FAILS + fork)
    assert done.stdout.splitlines()[-2:] == ["0", "a handler of the program"], done.stderr
    assert done.returncode == 1


OF_A_CHILD = """
import multiprocessing
from accelerate_cpp.checkpoint.background import BackgroundWriter
def fail():
    raise OSError("disk full")
def work():
    BackgroundWriter().start(fail)
if __name__ == "__main__":
    child = multiprocessing.get_context(METHOD).Process(target=work)
    child.start()
    child.join()
    print(child.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.long)])
def test_a_child_of_multiprocessing_fails_and_tells(tmp_path: Path, method: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(OF_A_CHILD.replace("METHOD", repr(method)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.endswith("OSError: disk full\n")


def test_an_interrupt_that_ends_a_wait_forgets_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, go, order = BackgroundWriter(), threading.Event(), []
    writer.start(lambda: order.append(("first", go.wait(60))))
    join = threading.Thread.join

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.start(lambda: order.append(("never", True)))
    assert order == []
    later = threading.Timer(0.1, go.set)
    later.start()
    writer.start(lambda: order.append(("second", True)))
    writer.wait()
    later.join()
    assert order == [("first", True), ("second", True)]


def test_a_job_that_has_not_begun_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a notebook may end right after the save."""
    writer, go, done = BackgroundWriter(), threading.Event(), []
    run = writer._run

    def later(job: Callable[[], None]) -> None:
        go.wait(60)
        run(job)

    monkeypatch.setattr(writer, "_run", later)
    writer.start(lambda: done.append(True))
    release = threading.Timer(0.1, go.set)
    release.start()
    await_writers()
    release.join()
    assert done == [True]


def test_an_interrupt_before_a_job_begins_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    writer, done = BackgroundWriter(), []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.start(lambda: done.append("never"))
    await_writers()
    writer.start(lambda: done.append("next"))
    writer.wait()
    assert done == ["next"]
