"""Tests with the real torch_xla on CPUs, run by ``make test-xla``; they are skipped where it is not installed.

torch_xla is only imported in processes that the tests start.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
Run = Callable[..., Any]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch_xla") is not None:
        return
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs torch_xla: run make test-xla"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Calls a function of ``runs.py`` in a process of torch_xla with so many devices; returns what it returns."""

    def call(name: str, *arguments: Any, devices: int = 1, **variables: str) -> Any:
        torch.save(arguments, tmp_path / "arguments")
        program = (
            "import sys, torch; sys.path.insert(0, sys.argv[1]); import runs\n"
            "arguments = torch.load(sys.argv[3] + '/arguments', weights_only=False)\n"
            "torch.save(getattr(runs, sys.argv[2])(*arguments), sys.argv[3] + '/result')\n"
        )
        own = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices), "HF_HOME": str(tmp_path), **variables}
        done = subprocess.run(
            [sys.executable, "-c", program, str(FOLDER), name, str(tmp_path)],
            env={**os.environ, **own},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return torch.load(tmp_path / "result", weights_only=False)

    return call
