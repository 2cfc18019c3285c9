"""A task comes back from its file as it was."""

from __future__ import annotations

from pathlib import Path

from accelerate_cpp.check.task import Task


def test_a_task_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    task = Task("train.py", ("--lr", "1"), True, 3, 5.0, 6.0, 2, 8, {"mixed_precision": ("bf16", "--mixed_precision")})
    task.save(tmp_path)
    assert Task.load(tmp_path) == task
