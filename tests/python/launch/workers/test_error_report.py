from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp.errors import PeerLost
from accelerate_cpp.launch.workers.error_report import MOST_BYTES, ErrorReport, LastOutput


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_report_survives_the_way_to_the_launcher() -> None:
    report = ErrorReport.of(_raised(ValueError("böom")))
    assert ErrorReport.parse(report.render()) == report
    assert report.summary == report.headline == "ValueError: böom"
    assert report.traceback.startswith("Traceback (most recent call last)")
    assert report.blames is None


def test_report_knows_whom_the_error_blames() -> None:
    report = ErrorReport.of(_raised(PeerLost("rank 1 died")))
    assert report.blames == (1,)
    assert ErrorReport.parse(report.render()) == report


def _led_to(first: BaseException, *, hidden: bool = False) -> BaseException:
    """The program's own error, raised while it handled ``first``."""
    try:
        try:
            raise first
        except BaseException as error:
            raise RuntimeError("training failed") from (None if hidden else error)
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("hidden", [False, True])
def test_error_that_another_led_to_blames_whom_that_one_blames(hidden: bool) -> None:
    report = ErrorReport.of(_led_to(PeerLost("rank 1 died"), hidden=hidden))
    assert report.headline == "RuntimeError: training failed"
    assert report.blames == (1,)
    assert ErrorReport.of(_led_to(ValueError("own"), hidden=hidden)).blames is None


def test_errors_that_lead_to_each_other_end() -> None:
    first, second = ValueError("one"), ValueError("two")
    first.__context__, second.__context__ = second, first
    assert ErrorReport.of(first).blames is None


def test_halves_of_characters_become_text_that_every_stream_takes() -> None:
    """A name of a file that is not UTF-8 has them."""
    report = ErrorReport.parse(ErrorReport.of(_raised(ValueError("cannot read b\udce9"))).render())
    assert report is not None
    assert report.headline == "ValueError: cannot read b\\udce9"
    assert report.traceback.encode().endswith(b"b\\udce9")


@pytest.mark.parametrize("data", [b"", b'{"summary": "Val'])
def test_report_that_did_not_arrive_is_none(data: bytes) -> None:
    assert ErrorReport.parse(data) is None


def test_headline_of_a_syntax_error_is_its_message() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = (", "train.py", "exec")
    report = ErrorReport.of(caught.value)
    assert report.headline == "SyntaxError: '(' was never closed"
    assert report.summary.startswith('  File "train.py", line 1\n')


def test_what_ended_a_worker_is_its_report_and_not_what_it_printed() -> None:
    printed = "Traceback (most recent call last):\nKeyError: 7\nwent on\n"
    assert LastOutput(printed).reported == ""
    assert LastOutput(printed, ErrorReport("ValueError: boom", "trace", None)).reported == "ValueError: boom"


def test_worker_without_a_report_is_known_by_what_it_printed() -> None:
    printed = "Traceback (most recent call last):\naccelerate_cpp.errors.PeerLost: rank 3 died\n"
    known = LastOutput(printed)
    assert (known.error, known.blames) == ("accelerate_cpp.errors.PeerLost: rank 3 died", (3,))
    assert known.traceback == printed.rstrip()
    told = LastOutput(printed, ErrorReport("KeyError: 1", "trace", None))
    assert (told.error, told.blames, told.traceback) == ("KeyError: 1", None, "trace")


def _run(code: str, launcher: int, folder: Path, exit_code: int = 1) -> tuple[str, ErrorReport | None]:
    """What a program prints on standard error, and its report, if ``launcher`` is said to have started it."""
    with (folder / "report").open("w+b") as file:
        environment = os.environ | {"ACCELERATE_CPP_ERROR_REPORT": f"{file.fileno()}:{launcher}"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, pass_fds=[file.fileno()], capture_output=True, text=True)
        assert done.returncode == exit_code
        return done.stderr, ErrorReport.parse((folder / "report").read_bytes())


def test_program_leaves_its_report_and_prints_nothing(tmp_path: Path) -> None:
    printed, report = _run("raise ValueError('boom')", os.getpid(), tmp_path)
    assert printed == ""
    assert report is not None
    assert report.headline == "ValueError: boom"
    assert report.traceback.splitlines()[1] == '  File "<string>", line 1, in <module>'


def test_process_that_the_launcher_has_not_started_prints_its_error(tmp_path: Path) -> None:
    printed, report = _run("raise ValueError('boom')", os.getpid() + 1, tmp_path)
    assert printed.endswith("\nValueError: boom\n")
    assert report is None


def test_error_is_printed_where_the_report_cannot_be_written(tmp_path: Path) -> None:
    code = "import os\nos.close(int(os.environ['ACCELERATE_CPP_ERROR_REPORT'].partition(':')[0]))\nraise KeyError(7)"
    printed, report = _run(code, os.getpid(), tmp_path)
    assert printed.endswith("\nKeyError: 7\n")
    assert report is None


def test_fork_of_a_worker_prints_its_error(tmp_path: Path) -> None:
    code = "import os\nif os.fork() == 0: raise ValueError('of the fork')\nos.wait()\nraise ValueError('of the worker')"
    printed, report = _run(code, os.getpid(), tmp_path)
    assert printed.endswith("\nValueError: of the fork\n")
    assert report is not None
    assert report.headline == "ValueError: of the worker"


THREAD = """
import sys, threading
threading.excepthook = lambda of: sys.excepthook(of.exc_type, of.exc_value, of.exc_traceback)
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
"""
CONSOLE = """
import code
lines = iter(["1 / 0"])
def read(prompt):
    try:
        return next(lines)
    except StopIteration:
        raise EOFError from None
code.interact(banner="", readfunc=read, exitmsg="")
"""
CAUGHT = "import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.excepthook(*sys.exc_info())"


@pytest.mark.parametrize("calls", [THREAD, CONSOLE, CAUGHT], ids=["thread", "console", "caught"])
def test_error_that_does_not_end_the_program_is_printed_and_not_reported(tmp_path: Path, calls: str) -> None:
    printed, report = _run(calls, os.getpid(), tmp_path, exit_code=0)
    assert "ZeroDivisionError: division by zero\n" in printed
    assert report is None
    _, report = _run(f"{calls}\nraise ValueError('boom')", os.getpid(), tmp_path)
    assert report is not None
    assert report.headline == "ValueError: boom"


def test_hook_of_the_program_that_calls_ours_leaves_the_report(tmp_path: Path) -> None:
    code = "import sys\nours = sys.excepthook\nsys.excepthook = lambda *error: ours(*error)\nraise ValueError('boom')"
    printed, report = _run(code, os.getpid(), tmp_path)
    assert printed == ""
    assert report is not None


@pytest.mark.parametrize("first", ["", "import torch._dynamo.utils; "], ids=["plain", "with_torchs_summary_at_exit"])
def test_interrupted_program_ends_by_the_interrupt_and_not_with_an_exit_code(tmp_path: Path, first: str) -> None:
    printed, report = _run(f"{first}raise KeyboardInterrupt", os.getpid(), tmp_path, -signal.SIGINT)
    assert printed == ""
    assert report is not None
    assert report.headline == "KeyboardInterrupt"


@pytest.mark.parametrize("character", ["x", "字", "\U0001f600", "\n"])
def test_report_of_an_endless_message_has_its_ends(character: str) -> None:
    error = ValueError("begins" + character * MOST_BYTES + "ends")
    rendered = ErrorReport.of(error).render()
    assert len(rendered) <= MOST_BYTES
    report = ErrorReport.parse(rendered)
    assert report is not None
    assert report.headline.startswith("ValueError: begins")
    assert report.traceback.rstrip().endswith("ends")
    assert "characters are left out" in report.traceback
