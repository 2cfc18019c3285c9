"""The original's own unit tests on both packages, and the tool that counts them.

They are taken from what ORIGINALS_SDIST names, an unpacked source distribution or its archive, else from pip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

VERSION = "1.15.0"
TOOL = Path(__file__).with_name("run_originals_tests.py")
# Three tests, of which each package passes two.
TESTS = """
from accelerate import Accelerator

def test_on_both():
    assert Accelerator

def test_on_the_original():
    assert Accelerator.__module__.startswith("accelerate.")

def test_here():
    assert Accelerator.__module__.startswith("accelerate_cpp.")
"""
# As a process dies that a signal ends.
DEADLY = "import os\n\ndef test_before():\n    pass\n\ndef test_deadly():\n    os._exit(0)\n"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Stands for a source distribution."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    return tmp_path


def expect(folder: Path, original_alone: dict[str, str], left_out: dict[str, str] | None = None) -> Path:
    path = folder / "expectations.json"
    path.write_text(json.dumps({"left out": left_out or {}, "original alone": original_alone}))
    return path


@pytest.mark.long
def test_tests_are_counted_on_both_and_one_that_is_not_listed_fails(folder: Path) -> None:
    report = folder / "report.json"
    done = run(folder, "--report", report, "--expectations", expect(folder, {}))
    assert done.returncode == 1, done.stderr
    surprise, counts = done.stdout.splitlines()
    assert surprise == "passes on the original alone: test_some.py::test_on_the_original"
    assert counts == (
        "2 tests pass on the original here, 1 of them on this package; 1 on the original alone, 1 on this package alone"
    )
    assert json.loads(report.read_text())["accelerate_cpp"] == {
        "test_some.py::test_on_both": "passed",
        "test_some.py::test_on_the_original": "failed",
        "test_some.py::test_here": "passed",
    }


@pytest.mark.long
def test_a_listed_test_may_fail_here_and_has_to(folder: Path) -> None:
    listed = {"test_some.py::test_on_the_original": "asks for the module"}
    assert run(folder, "--expectations", expect(folder, listed)).returncode == 0
    listed |= {"test_some.py::test_on_both": "is wrong", "test_some.py::test_gone": "was there once"}
    done = run(folder, "--expectations", expect(folder, listed))
    assert done.returncode == 1
    assert done.stdout.splitlines()[:2] == [
        "is listed, and passes: test_some.py::test_on_both",
        "is listed, and there is no such test: test_some.py::test_gone",
    ]


def test_a_process_that_dies_does_not_hide_a_test(folder: Path) -> None:
    (folder / "tests" / "test_deadly.py").write_text(DEADLY)
    report = folder / "report.json"
    left_out = {"test_some.py": "has its own test"}
    assert run(folder, "--report", report, "--expectations", expect(folder, {}, left_out)).returncode == 0
    outcomes = {"test_deadly.py::test_before": "passed", "test_deadly.py::test_deadly": "unfinished"}
    assert json.loads(report.read_text()) == {"accelerate_cpp": outcomes, "accelerate": outcomes}


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert f"{tmp_path} has no tests/test_*.py" in done.stderr


def source_distribution(place: Path) -> Path:
    """The unpacked folder; skips where there is none to be had."""
    given = os.environ.get("ORIGINALS_SDIST")
    if given is not None and Path(given).is_dir():
        return Path(given)
    if given is None:
        options = ["--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(place)]
        pip = [sys.executable, "-m", "pip", "download", *options, f"accelerate=={VERSION}"]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(
                f"pip cannot get the source distribution of accelerate {VERSION}: let ORIGINALS_SDIST name it "
                f"({(done.stderr.strip().splitlines() or ['pip says nothing'])[-1]})"
            )
        given = str(next(place.glob("accelerate-*.tar.gz")))
    with tarfile.open(given) as archive:
        archive.extractall(place, filter="data")
    return next(path for path in place.glob("accelerate-*") if path.is_dir())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_tests_of_the_original_pass_here_but_for_those_that_are_listed(tmp_path: Path) -> None:
    if importlib.util.find_spec("parameterized") is None:
        pytest.skip("parameterized, which the original's tests need, is not installed: see requirements/libraries.txt")
    done = run(source_distribution(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
