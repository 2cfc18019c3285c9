"""What a watcher has seen, without a launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.check.journal import Journal, of_kind, read_journals
from accelerate_cpp.check.observed import Observed
from accelerate_cpp.check.task import Task
from accelerate_cpp.comm.mesh import Mesh

Found = Callable[[], dict[str, str]]


@pytest.fixture
def observed(tmp_path: Path) -> Observed:
    """Of a task for two processes, with an ``Accelerator`` that has prepared nothing."""
    accelerator = SimpleNamespace(
        gradient_accumulation_steps=1,
        scaler=None,
        _models=[],
        _optimizers=[],
        _schedulers=[],
        _dataloaders=[],
        _custom_objects=[],
        _session=SimpleNamespace(strategy=SimpleNamespace(trains_batches=False), topology=SimpleNamespace(mesh=Mesh())),
    )
    seen = Observed(Task("train.py", processes=2, configured=2), Journal(tmp_path, 0))
    seen.accelerators.append(accelerator)
    return seen


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """What was found so far: the levels by their codes."""

    def read() -> dict[str, Any]:
        return {one["code"]: one["level"] for one in of_kind(read_journals(tmp_path).get(0, ()), "finding")}

    return read
