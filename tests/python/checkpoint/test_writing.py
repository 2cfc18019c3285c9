"""Writing a checkpoint: whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accelerate_cpp.checkpoint import writing as saving
from accelerate_cpp.checkpoint.files import FileRecord
from accelerate_cpp.checkpoint.layout import StateFile, random_states_file
from accelerate_cpp.checkpoint.manifest import Manifest, read_manifest, why_not_whole
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.snapshot import SnapshotMemory
from accelerate_cpp.checkpoint.writing import Checkpoint
from accelerate_cpp.errors import SystemFailure


def checkpoint(target: Path, value: float = 1.0, limit: int | None = None) -> Checkpoint:
    files = [StateFile("model.safetensors", {"a": torch.full((4,), value)}, safe=True), random_states_file(0, 0)]
    return Checkpoint(target, "token", files, Manifest(3, 1, {}, []), limit)


class Unwritable(StateFile):
    def write(self, folder: Path) -> FileRecord:
        raise SystemFailure(errno.ENOSPC, "no space left")


def test_a_checkpoint_is_whole_and_alone(tmp_path: Path) -> None:
    checkpoint(tmp_path / "c").write(Participants())
    assert os.listdir(tmp_path) == ["c"]
    assert why_not_whole(tmp_path / "c", Participants()) is None
    manifest = read_manifest(tmp_path / "c")
    assert manifest is not None
    assert (manifest.iteration, sorted(manifest.files)) == (3, ["model.safetensors", "random_states_0.pkl"])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("existed", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path: Path, existed: bool, threads: int) -> None:
    if existed:
        checkpoint(tmp_path / "c").write(Participants())
    good = checkpoint(tmp_path / "c", 2.0)
    failing = replace(good, files=[*good.files, Unwritable("optimizer.bin", {})], existed=existed)
    with pytest.raises(OSError, match="no space left"):
        failing.write(Participants(), threads)
    assert os.listdir(tmp_path) == (["c"] if existed else [])
    if existed:
        assert why_not_whole(tmp_path / "c", Participants()) is None


def test_what_hooks_wrote_into_a_new_folder_goes_with_the_failure(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "by_a_hook").touch()
    with pytest.raises(OSError, match="no space left"):
        replace(checkpoint(tmp_path / "c"), files=[Unwritable("optimizer.bin", {})]).write(Participants())
    assert os.listdir(tmp_path) == []


def test_older_checkpoints_are_pruned_only_after_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        checkpoint(tmp_path / f"checkpoint_{number}").write(Participants())
    seen = []
    prune = saving.prune

    def looking(folder: Path, limit: int, newest: Path) -> None:
        seen.append(sorted(os.listdir(folder)))
        prune(folder, limit, newest)

    monkeypatch.setattr(saving, "prune", looking)
    checkpoint(tmp_path / "checkpoint_3", limit=2).write(Participants())
    assert seen == [["checkpoint_1", "checkpoint_2", "checkpoint_3"]]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_2", "checkpoint_3"]


def test_an_old_checkpoint_that_cannot_be_removed_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path / "checkpoint_2").write(Participants())
    rename = os.rename

    def refuses(source: Path, target: Path) -> None:
        if source == tmp_path / "checkpoint_2":
            raise PermissionError(errno.EPERM, "not yours", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuses)
    checkpoint(tmp_path / "checkpoint_3", limit=1).write(Participants())
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_2", "checkpoint_3"]
    assert "checkpoint_2 is one checkpoint too many and could not be removed" in caplog.text


def test_leftovers_are_gone_before_anything_is_written(tmp_path: Path) -> None:
    leftover = tmp_path / ".c.tmp-killed"
    leftover.mkdir()
    seen: list[bool] = []

    class Looking(StateFile):
        def write(self, folder: Path) -> FileRecord:
            seen.append(leftover.exists())
            return super().write(folder)

    replace(checkpoint(tmp_path / "c"), files=[Looking("optimizer.bin", {})]).write(Participants())
    assert seen == [False], "they may take the room that it needs"


@pytest.mark.parametrize("gone", ["file", "folder"])
def test_a_checkpoint_whose_files_vanish_while_it_is_written_does_not_appear(tmp_path: Path, gone: str) -> None:
    class Vanishing(StateFile):
        def write(self, folder: Path) -> FileRecord:
            record = super().write(folder)
            (folder / self.name).unlink()
            if gone == "folder":
                shutil.rmtree(folder)
            return record

    lost = [Vanishing("optimizer.bin", {}), random_states_file(0, 0)]
    expected = "optimizer.bin is gone, which rank 0 has written" if gone == "file" else "No such file or directory"
    with pytest.raises(SystemFailure, match=expected):
        replace(checkpoint(tmp_path / "c"), files=lost).write(Participants())
    assert os.listdir(tmp_path) == []


def test_a_refusal_of_the_system_says_what_is_needed_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.EROFS, "read-only", str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", refuses)
    with pytest.raises(SystemFailure) as refusal:
        checkpoint(tmp_path / "c").write(Participants())
    assert refusal.value.errno == errno.EROFS
    told = str(refusal.value)
    for part in (
        f"Read-only file system while making room for {tmp_path / 'c'} ({tmp_path})",
        "make the folder one that this user may write, or choose another",
        "bytes of tensors in 2 files or folders, and the disk has room for ",
    ):
        assert part in told


def test_a_copy_does_not_follow_the_model(tmp_path: Path) -> None:
    tensor = torch.zeros(4)
    original = replace(checkpoint(tmp_path / "c"), files=[StateFile("model.safetensors", {"a": tensor}, safe=True)])
    copied = original.copied(SnapshotMemory())
    tensor.fill_(1)
    assert copied.files[0].content["a"].tolist() == [0, 0, 0, 0]
