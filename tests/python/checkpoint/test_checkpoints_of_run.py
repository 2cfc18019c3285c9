"""The order of things in one save and one load; whole runs are in tests/python/test_checkpointing.py."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint import checkpoints_of_run
from accelerate_cpp.checkpoint.checkpoints_of_run import Checkpoints
from accelerate_cpp.checkpoint.folder import begin
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.writing import Checkpoint
from accelerate_cpp.errors import CheckpointError, OtherRankFailed, PeerLost
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.utils.dataclasses import ProjectConfiguration
from threaded_ranks import outcomes, ranks_of

MODEL = torch.nn.Linear(1, 1)
ONE_RANK = Participants()


def save(
    checkpoints: Checkpoints,
    folder: Path | None,
    project: ProjectConfiguration,
    ranks: Participants = ONE_RANK,
    cursors: Any = ({"epoch": 2, "generator": "abc"},),
    **options: Any,
) -> Path:
    parts = Bundle(models=[torch.nn.Linear(1, 1)])
    return checkpoints.save(folder, project, ranks, parts, SingleStrategy(), 7, lambda: list(cursors), **options)


def load(
    checkpoints: Checkpoints, folder: Path | None, project: ProjectConfiguration, ranks: Participants = ONE_RANK
) -> Any:
    return checkpoints.load(folder, project, ranks, Bundle(models=[MODEL]), SingleStrategy(), lambda _: None)


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


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("where", ["a", "b", "neither"])
def test_hooks_find_the_folder_on_each_host(tmp_path: Path, where: str, fails: bool) -> None:
    """Each of two hosts has a disk of its own, and the program has made the folder on one of them."""
    if where != "neither":
        (tmp_path / where / "c").mkdir(parents=True)
        (tmp_path / where / "c" / "config").touch()

    def save_there(ranks: Participants) -> None:
        def hook(_models: Any, _weights: Any, folder: str) -> None:
            (Path(folder) / "note").write_text("mine")
            if fails and ranks.place == 1:
                raise KeyError("in the hook")

        checkpoints = Checkpoints()
        checkpoints.add_save_hook(hook)
        save(checkpoints, tmp_path / "ab"[ranks.place] / "c", ProjectConfiguration(), ranks)

    found = outcomes(ranks_of([0, 1]), save_there)
    assert [type(one) for one in found] == ([OtherRankFailed, KeyError] if fails else [type(None)] * 2)
    for name in "ab":
        others = {"config", "note"} if name == where else {"note"}
        if fails:
            assert os.listdir(tmp_path / name) == (["c"] if name == where else [])
            assert name != where or set(os.listdir(tmp_path / name / "c")) == others
        else:
            assert os.listdir(tmp_path / name) == ["c"]
            assert others < set(os.listdir(tmp_path / name / "c"))


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


@pytest.fixture
def one_reads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pickles may hold is known to torch by process, and ranks are threads here."""
    read, lock = checkpoints_of_run.read_states, threading.Lock()

    def locked(*arguments: Any) -> Any:
        with lock:
            return read(*arguments)

    monkeypatch.setattr(checkpoints_of_run, "read_states", locked)


@pytest.mark.usefixtures("one_reads_at_a_time")
@pytest.mark.parametrize("alone", [False, True])
def test_hosts_do_not_load_checkpoints_of_two_saves_under_one_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, alone: bool
) -> None:
    """The second save has ended on one of them only, or each host has saved for itself, after other steps."""
    folders = [tmp_path / "a", tmp_path / "b"]

    def project_of(ranks: Participants) -> ProjectConfiguration:
        folder = str(folders[ranks.topology.rank])
        return ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, save_on_each_node=True)

    def saves(ranks: Participants) -> None:
        project, checkpoints = project_of(ranks), Checkpoints()
        for step in range(2):
            late = ranks.topology.rank if alone and step == 1 else 0
            cursors = [{"epoch": 0, "position": step + late, "seed": ranks.topology.rank}]
            who = Participants(ranks.topology, alone=True) if alone else ranks
            save(checkpoints, None, project, who, cursors=cursors)

    def loads(ranks: Participants) -> int:
        project = project_of(ranks)
        load(Checkpoints(), None, project, ranks)
        return project.iteration

    assert outcomes(ranks_of([0, 1]), saves) == [None] * 2
    if not alone:
        kept = (folders[1] / "checkpoints" / "checkpoint_1").rename(tmp_path / "kept")
        for folder in folders:
            shutil.rmtree(folder / "checkpoints")
        assert outcomes(ranks_of([0, 1]), saves) == [None] * 2
        shutil.rmtree(folders[1] / "checkpoints" / "checkpoint_1")
        kept.rename(folders[1] / "checkpoints" / "checkpoint_1")
    assert outcomes(ranks_of([0, 1]), loads) == [2, 2]
    assert "checkpoint_1 is incomplete and is skipped: checkpoint_1: rank 0 and rank 1 have different" in caplog.text
    assert "checkpoint_0 is incomplete" not in caplog.text


@pytest.mark.usefixtures("one_reads_at_a_time")
def test_a_named_checkpoint_is_the_same_one_on_all_ranks_but_ranks_may_name_others(tmp_path: Path) -> None:
    def saves(ranks: Participants) -> None:
        for name in ("a", "b") if ranks.place == 0 else ("b", "a"):
            save(Checkpoints(), tmp_path / f"{ranks.place}{name}", ProjectConfiguration(save_on_each_node=True), ranks)

    def loads(ranks: Participants) -> None:
        load(Checkpoints(), tmp_path / f"{ranks.place}a", ProjectConfiguration(), ranks)

    assert outcomes(ranks_of([0, 1]), saves) == [None] * 2
    assert outcomes(ranks_of([0, 1]), loads) == [None] * 2
    found = [("c", "first"), ("d", "other"), ("c", ""), ("c", "second")]
    told = checkpoints_of_run._difference_of(found)
    assert told is not None
    assert told.startswith("c: rank 0 and rank 3 have different checkpoints under this name")
    assert checkpoints_of_run._difference_of(found[:3]) is None
