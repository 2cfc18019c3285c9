"""accelerate-cpp test: launches its script by flags or by a file, and says how it went."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", "test", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("processes", [1, 3])
def test_what_works_is_said_to_work(tmp_path: Path, processes: int) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"distributed_type: MULTI_CPU\nnum_processes: {processes}\n")
    done = run("--config_file", path)
    assert done.returncode == 0, done.stderr
    passed = [f"{name}: passed on {processes} process(es)" for name in ("communication", "data", "training")]
    assert done.stdout.splitlines() == [*passed, "accelerate-cpp test: everything works; train on"]


def test_a_configuration_that_cannot_work_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\n")
    done = run("--config_file", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"num_processes is -1 ({path}: num_processes)" in done.stderr
