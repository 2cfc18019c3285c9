"""Tracebacks through rich."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("rich")

FAILING = "import accelerate_cpp\ndef train(secret):\n    1 / 0\ntrain('password')\n"


def run(script: str, asked: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ACCELERATE_ENABLE_RICH": asked},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("asked", "in_a_frame"), [("1", True), ("", False), ("0", False)])
def test_a_failed_program_shows_a_frame_when_asked_and_fails_all_the_same(asked: str, in_a_frame: bool) -> None:
    done = run(FAILING, asked)
    assert done.returncode == 1
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert ("╭" in done.stderr) is in_a_frame
    assert "password" not in done.stderr.replace("train('password')", "")


def test_a_program_without_rich_runs_as_if_nobody_had_asked() -> None:
    done = run("import sys\nsys.modules['rich'] = None\n" + FAILING, "1")
    assert (done.returncode, "╭" in done.stderr) == (1, False)
    assert "ZeroDivisionError" in done.stderr


def test_asking_loads_no_torch() -> None:
    done = run("import sys, accelerate_cpp\nprint('torch' in sys.modules, 'rich' in sys.modules)", "1")
    assert (done.stdout.split(), done.stderr) == (["False", "True"], "")


def test_the_module_by_itself_says_what_it_needs() -> None:
    done = run("import accelerate_cpp.utils.rich", "")
    assert done.returncode == 1
    assert "expected ACCELERATE_ENABLE_RICH=1 in the environment and the library rich" in done.stderr
