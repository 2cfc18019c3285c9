"""The order of things in one save and one load; whole runs are in tests/python/test_checkpointing.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint.checkpoints_of_run import Checkpoints
from accelerate_cpp.checkpoint.folder import begin
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.writing import Checkpoint
from accelerate_cpp.errors import CheckpointError, PeerLost
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.utils.dataclasses import ProjectConfiguration

MODEL = torch.nn.Linear(1, 1)


def save(checkpoints: Checkpoints, folder: Path | None, project: ProjectConfiguration, **options: Any) -> Path:
    model = torch.nn.Linear(1, 1)
    parts, cursors = Bundle(models=[model]), [{"epoch": 2, "generator": "abc"}]
    return checkpoints.save(folder, project, Participants(), parts, SingleStrategy(), 7, lambda: cursors, **options)


def load(checkpoints: Checkpoints, folder: Path | None, project: ProjectConfiguration) -> Any:
    return checkpoints.load(folder, project, Participants(), Bundle(models=[MODEL]), SingleStrategy(), lambda _: None)


def test_step_cursors_and_iteration_come_back(tmp_path: Path) -> None:
    project = ProjectConfiguration(iteration=4)
    save(Checkpoints(), tmp_path / "c", project)
    assert project.iteration == 5
    fresh = ProjectConfiguration()
    assert load(Checkpoints(), tmp_path / "c", fresh) == ({"step": 7}, [{"epoch": 2, "generator": "abc"}])
    assert fresh.iteration == 5


@pytest.mark.parametrize("blocking", [True, False])
def test_a_hook_that_fails_leaves_neither_folder_nor_iteration(tmp_path: Path, blocking: bool) -> None:
    checkpoints = Checkpoints()
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)

    def fail(_models: Any, _weights: Any, folder: str) -> None:
        (Path(folder) / "half").touch()
        raise KeyError("in the hook")

    handle = checkpoints.add_save_hook(fail)
    with pytest.raises(KeyError, match="in the hook"):
        save(checkpoints, None, project, blocking=blocking)
    assert project.iteration == 0
    assert list((tmp_path / "checkpoints").iterdir()) == []
    handle.remove()
    assert save(checkpoints, None, project).name == "checkpoint_0"


@pytest.mark.parametrize("exists", [True, False])
def test_hooks_find_the_folder_wherever_it_is_to_be(tmp_path: Path, exists: bool) -> None:
    checkpoints, target = Checkpoints(), tmp_path / "of" / "a run"
    if exists:
        target.mkdir(parents=True)
    checkpoints.add_save_hook(lambda _models, _weights, folder: (Path(folder) / "note").write_text("mine"))
    assert save(checkpoints, target, ProjectConfiguration()) == target
    assert (target / "note").read_text() == "mine"


def test_a_run_goes_on_over_what_a_killed_save_with_hooks_has_left(tmp_path: Path) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    checkpoints, folder = Checkpoints(), tmp_path / "checkpoints"
    save(checkpoints, None, project)
    begin(folder / "checkpoint_1")
    (folder / "checkpoint_1" / "of the killed one").touch()
    checkpoints.add_save_hook(lambda _models, _weights, path: (Path(path) / "note").write_text("mine"))
    load(checkpoints, None, project)
    assert save(checkpoints, None, project) == folder / "checkpoint_1"
    assert (folder / "checkpoint_1" / "note").exists()
    assert not (folder / "checkpoint_1" / "of the killed one").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "checkpoint_1"]


def test_a_rank_that_is_lost_after_the_move_has_not_left_its_number_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    checkpoints, move = Checkpoints(), Checkpoint._move

    def lost(self: Checkpoint, *arguments: Any) -> None:
        move(self, *arguments)
        raise PeerLost("rank 1 has ended")

    monkeypatch.setattr(Checkpoint, "_move", lost)
    with pytest.raises(PeerLost):
        save(checkpoints, None, project)
    monkeypatch.setattr(Checkpoint, "_move", move)
    assert save(checkpoints, None, project).name == "checkpoint_1"


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    checkpoints, project = Checkpoints(), ProjectConfiguration()
    (tmp_path / "file").touch()
    save(checkpoints, tmp_path / "file" / "c", project, blocking=False)
    with pytest.raises(OSError, match="file"):
        save(checkpoints, tmp_path / "c", project)
    save(checkpoints, tmp_path / "c", project)


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    checkpoints, project = Checkpoints(), ProjectConfiguration()
    save(checkpoints, tmp_path / "c", project)
    (tmp_path / "c" / "model.safetensors").write_bytes(b"")
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected \d+ bytes, found 0"):
        load(checkpoints, tmp_path / "c", project)
    assert torch.equal(torch.get_rng_state(), before)
