"""accelerate-cpp test: launches its script by flags or by a file, and says how it went."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Run = Callable[..., CompletedProcess[str]]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 3])
def test_what_works_is_said_to_work(run: Run, tmp_path: Path, processes: int) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"distributed_type: MULTI_CPU\nnum_processes: {processes}\n")
    done = run("test", "--config_file", path)
    assert done.returncode == 0, done.stderr
    passed = [f"{name}: passed on {processes} process(es)" for name in ("communication", "data", "training")]
    assert done.stdout.splitlines() == [*passed, "accelerate-cpp test: everything works; train on"]


def test_a_configuration_that_cannot_work_is_one_sentence(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("distributed_type: MULTI_GPU\n")
    done = run("test", "--config_file", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"num_processes is -1 ({path}: num_processes)" in done.stderr


def test_the_command_can_be_called(tmp_path: Path) -> None:
    script = (
        "import sys; from accelerate_cpp.commands import test; "
        "sys.exit(test.test_command(test.test_command_parser().parse_args(['--cpu', '--num_processes', '1'])))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "training: passed on 1 process(es)" in done.stdout
