"""Whoever can write into the folder from which a program is started runs nothing in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from accelerate_cpp.launch.plan.own_program import module_program

TAKEN = ("argparse", "json", "queue", "runpy", "socket")
PROGRAM = ("accelerate_cpp.check.run", "accelerate_cpp.commands.launch", "torch.distributed.run")
FORK_SERVER = """
import sys
from accelerate_cpp.launch.fork.fork_server import ForkServer, receive
sys.path.insert(0, "")  # as in a kernel
server = ForkServer(())
print("said", receive(server._channel))
server.end()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One in which somebody has put modules with names that programs import."""
    there = tmp_path / "shared"
    there.mkdir()
    for name in TAKEN:
        (there / f"{name}.py").write_text("print('taken', flush=True); import os; os._exit(9)\n")
    return there


def ran(command: Sequence[str], folder: Path) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    return done.stdout + done.stderr


@pytest.mark.parametrize("module", PROGRAM)
def test_programs_that_a_launch_starts_import_nothing_from_it(folder: Path, module: str) -> None:
    assert "taken" in ran([sys.executable, "-m", module, "--help"], folder)  # as this would
    said = ran([*module_program(module), "--help"], folder)
    assert "taken" not in said
    assert "usage" in said or "--help/" in said  # a check looks for its task in the folder of this name


def test_server_of_forks_imports_nothing_from_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(FORK_SERVER)
    said = ran([sys.executable, str(tmp_path / "notebook.py")], folder)
    assert "taken" not in said
    assert "said" in said
