from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerate_cpp.launch.fork.forked_child import run_child
from accelerate_cpp.launch.fork.results import result_files, values_of
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.error_report import ErrorReport


def _run(task: Callable[[], object]) -> tuple[int, str, str, ErrorReport | None]:
    """Runs ``task`` in a fork and returns its exit code, what it printed, what it complained, and its report."""
    pipes = [os.pipe() for _ in range(4)]
    setup = ChildSetup()
    with result_files(1) as (result,):
        write_ends = (pipes[0][1], pipes[1][1], pipes[2][1], pipes[3][1])
        pid = os.fork()
        if pid == 0:
            run_child(task, dict(os.environ), setup, write_ends, result, [end for end, _ in pipes])
    texts = []
    for read_end, write_end in pipes:
        os.close(write_end)
        with open(read_end, encoding="utf-8") as pipe:
            texts.append(pipe.read())
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status, texts[0], texts[1], ErrorReport.parse(texts[2].encode())


def test_child_prints_to_its_pipes_in_any_way() -> None:
    def task() -> None:
        print("é")
        print("bad", file=sys.stderr)
        os.write(1, b"raw")

    assert _run(task) == (0, "é\nraw", "bad\n", None)


def test_what_the_child_returns_is_in_the_file() -> None:
    with result_files(1) as (result,):
        pipes = [os.pipe() for _ in range(4)]
        setup = ChildSetup()
        pid = os.fork()
        if pid == 0:
            write_ends = (pipes[0][1], pipes[1][1], pipes[2][1], pipes[3][1])
            run_child(lambda: {"loss": 0.5}, dict(os.environ), setup, write_ends, result, ())
        assert os.waitpid(pid, 0)[1] == 0
        assert values_of([result]) == [{"loss": 0.5}]
    for end in (end for pipe in pipes for end in pipe):
        os.close(end)


def test_childs_exception_becomes_a_report_that_starts_at_the_function() -> None:
    def task() -> None:
        raise ValueError("boom")

    code, _, complaints, report = _run(task)
    assert (code, complaints) == (1, "")
    assert report is not None
    assert report.summary == "ValueError: boom"
    assert 'forked_child.py", line' not in report.traceback.replace(__file__, "")


@pytest.mark.parametrize(("request_", "code"), [(None, 0), (0, 0), (3, 3), ("words", 1)])
def test_sys_exit_ends_the_child_as_it_ends_a_program(request_: object, code: int) -> None:
    def task() -> None:
        sys.exit(request_)  # type: ignore[arg-type]

    status, _, complaints, report = _run(task)
    assert (status, report) == (code, None)
    assert complaints == ("words\n" if request_ == "words" else "")


def test_the_others_are_told_the_words_of_sys_exit() -> None:
    def task() -> None:
        sys.modules["accelerate_cpp.runtime.session"] = SimpleNamespace(end_session=print)  # type: ignore[assignment]
        sys.exit("words")

    assert _run(task)[:3] == (1, "words\n", "words\n")


@pytest.mark.parametrize(("status", "code"), [(None, 1), (0, 1), (3, 3)])
def test_a_checkpoint_that_a_thread_could_not_write_is_the_error_of_the_child(status: int | None, code: int) -> None:
    def task() -> None:
        from accelerate_cpp.checkpoint.background import BackgroundWriter

        def write() -> None:
            raise OSError("disk full")

        BackgroundWriter().start(write)
        if status is not None:
            sys.exit(status)

    found, _, _, report = _run(task)
    assert found == code
    assert (report is None) == (code == 3)
    assert report is None or report.summary == "OSError: disk full"


@pytest.mark.parametrize("last", [None, SystemExit(0), ValueError("bad")], ids=repr)
def test_a_checkpoint_is_written_however_the_child_ends(tmp_path: Path, last: BaseException | None) -> None:
    go = tmp_path / "go"

    def task() -> None:
        from accelerate_cpp.checkpoint.background import BackgroundWriter

        def write() -> None:
            while "task" in {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}:
                pass
            go.touch()

        main = threading.get_ident()
        BackgroundWriter().start(write)
        if last is not None:
            raise last

    assert _run(task)[0] == isinstance(last, ValueError)
    assert go.exists()


def test_child_waits_for_the_threads_that_it_started() -> None:
    def task() -> None:
        release = threading.Event()

        def finish() -> None:
            release.wait()
            print("written")

        threading.Thread(target=finish).start()
        release.set()

    assert _run(task)[1] == "written\n"


def test_child_runs_no_exit_handler_of_its_parent() -> None:
    def handler() -> None:
        os.write(1, b"handler ran")

    atexit.register(handler)
    try:
        assert _run(lambda: None)[1] == ""
    finally:
        atexit.unregister(handler)


def test_childs_standard_input_is_empty() -> None:
    assert _run(lambda: print(repr(sys.stdin.read())))[1] == "''\n"
