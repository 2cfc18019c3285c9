"""The command as a program."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run() -> Run:
    """Runs ``accelerate-cpp`` with the arguments."""

    def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "accelerate_cpp.commands.accelerate_cli", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )

    return start
