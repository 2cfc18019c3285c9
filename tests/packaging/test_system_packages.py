"""What pip cannot bring is named when it is missing, and left alone when it is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "system-packages"
BASH = shutil.which("bash") or "bash"


@pytest.fixture
def bare_machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a user without root on a machine without a compiler."""
    user = tmp_path / "id"
    user.write_text("#!/bin/sh\necho 1000\n")
    user.chmod(0o755)
    return {"PATH": str(tmp_path)}


def check(environment: dict[str, str] | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [BASH, str(SCRIPT), sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_complete_machine_needs_nothing() -> None:
    done = check(None, "tests")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_packages_are_named_in_one_sentence_without_root(bare_machine: dict[str, str]) -> None:
    done = check(bare_machine, "tests")
    assert done.returncode == 1
    assert "g++ libgtest-dev libgmock-dev" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_build_alone_needs_no_googletest(bare_machine: dict[str, str]) -> None:
    done = check(bare_machine)
    assert done.returncode == 1
    assert "g++" in done.stderr
    assert "libgtest-dev" not in done.stderr
