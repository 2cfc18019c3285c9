"""The script that says where it runs, found by its path in the package and launched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from accelerate_cpp.test_utils import path_in_accelerate_package
from accelerate_cpp.test_utils.scripts import test_cli

SCRIPT = path_in_accelerate_package("test_utils", "scripts", "test_cli.py")


@pytest.mark.usefixtures("fresh_state")
def test_one_process_says_where_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    test_cli.main()
    assert capsys.readouterr().out == "process 0 of 1 runs on cpu\n"


def test_each_process_of_a_launch_says_a_line() -> None:
    flags = ["--cpu", "--num_processes", "2", str(SCRIPT)]
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == [f"process {rank} of 2 runs on cpu" for rank in range(2)]
