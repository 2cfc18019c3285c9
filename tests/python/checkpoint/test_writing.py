"""Writing a checkpoint: whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.checkpoint import writing as saving
from accelerate_cpp.checkpoint.files import FileRecord
from accelerate_cpp.checkpoint.folder import begin
from accelerate_cpp.checkpoint.layout import StateFile, random_states_file
from accelerate_cpp.checkpoint.manifest import Manifest, read_manifest, why_not_whole
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.snapshot import SnapshotMemory
from accelerate_cpp.checkpoint.writing import Checkpoint
from accelerate_cpp.errors import OtherRankFailed, PeerLost, SystemFailure
from threaded_ranks import ThreadRank, await_event, outcomes, ranks_of


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
    failing = replace(good, files=[*good.files, Unwritable("optimizer.bin", {})])
    with pytest.raises(OSError, match="no space left"):
        failing.write(Participants(), threads)
    assert os.listdir(tmp_path) == (["c"] if existed else [])
    if existed:
        assert why_not_whole(tmp_path / "c", Participants()) is None


def test_what_hooks_wrote_into_a_new_folder_goes_with_the_failure(tmp_path: Path) -> None:
    begin(tmp_path / "c")
    (tmp_path / "c" / "by_a_hook").touch()
    with pytest.raises(OSError, match="no space left"):
        replace(checkpoint(tmp_path / "c"), files=[Unwritable("optimizer.bin", {})]).write(Participants())
    assert os.listdir(tmp_path) == []


def test_a_folder_that_the_user_makes_meanwhile_stays_when_the_save_fails(tmp_path: Path) -> None:
    class MakesFolder(Unwritable):
        def write(self, folder: Path) -> FileRecord:
            (tmp_path / "c").mkdir()
            (tmp_path / "c" / "log").touch()
            return super().write(folder)

    with pytest.raises(OSError, match="no space left"):
        replace(checkpoint(tmp_path / "c"), files=[MakesFolder("optimizer.bin", {})]).write(Participants())
    assert os.listdir(tmp_path / "c") == ["log"]


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


DEALT_IN_TURN = [0, 1, 0, 1]  # the hosts of ranks


def test_hosts_with_their_own_disks_may_have_any_ranks(tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]

    def save(ranks: Participants) -> None:
        rank = ranks.topology.rank
        files = checkpoint(tmp_path).files[:1] if rank == 0 else []
        mine = replace(checkpoint(disks[DEALT_IN_TURN[rank]] / "c"), files=[*files, random_states_file(rank, 0)])
        mine.write(ranks)

    assert outcomes(ranks_of(DEALT_IN_TURN), save) == [None] * 4
    assert [os.listdir(disk) for disk in disks] == [["c"], ["c"]]
    written = [read_manifest(disk / "c") for disk in disks]
    assert [sorted(one.files) for one in written if one is not None] == [
        ["model.safetensors", "random_states_0.pkl", "random_states_2.pkl"],
        ["random_states_1.pkl", "random_states_3.pkl"],
    ]
    assert [why_not_whole(disk / "c", Participants()) for disk in disks] == [None, None]


def test_a_host_may_see_the_folder_for_a_while_after_another_one_has_moved_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients of NFS do, which know folders for up to a minute from what they have seen."""
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: path.name == ".c.tmp-token" or is_dir(path))

    def save(ranks: Participants) -> None:
        files = checkpoint(tmp_path).files[:1] if ranks.place == 0 else []
        replace(checkpoint(tmp_path / "c"), files=[*files, random_states_file(ranks.place, 0)]).write(ranks)

    assert outcomes(ranks_of([0, 0, 1, 1]), save) == [None] * 4
    assert os.listdir(tmp_path) == ["c"]
    names = ["model.safetensors", *(f"random_states_{rank}.pkl" for rank in range(4))]
    assert sorted(os.listdir(tmp_path / "c")) == ["accelerate_cpp.json", *names]
    written = read_manifest(tmp_path / "c")
    assert written is not None
    assert sorted(written.files) == names


def test_a_file_that_vanishes_is_missed_on_its_host_whatever_its_rank(tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]

    class Vanishing(StateFile):
        def write(self, folder: Path) -> FileRecord:
            record = super().write(folder)
            (folder / self.name).unlink()
            return record

    def save(ranks: Participants) -> None:
        rank = ranks.topology.rank
        kind = Vanishing if rank == 2 else StateFile
        mine = replace(checkpoint(disks[DEALT_IN_TURN[rank]] / "c"), files=[kind(f"optimizer_{rank}.bin", {})])
        mine.write(ranks)

    for error in outcomes(ranks_of(DEALT_IN_TURN), save):
        assert "optimizer_2.bin is gone, which rank 2 has written" in str(error)
    assert [os.listdir(disk) for disk in disks] == [[], []]


@pytest.mark.parametrize("lost_in", ["writing", "moving"])
@pytest.mark.parametrize("before", ["nothing", "a checkpoint", "files of hooks"])
def test_a_host_that_loses_a_rank_leaves_the_folder_to_the_one_that_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, lost_in: str
) -> None:
    """Two hosts share the disk; a rank is lost while rank 0 is between the manifest and the new name."""
    target, commit = tmp_path / "c", saving.commit
    moving, left = threading.Event(), threading.Event()
    if before == "a checkpoint":
        checkpoint(target).write(Participants())
    elif before == "files of hooks":
        begin(target)
        (target / "by_a_hook").touch()

    def paused(temporary: Path, new: Path) -> None:
        moving.set()
        await_event(left)
        commit(temporary, new)

    class Waiting(ThreadRank):
        def gather(self, value: Any) -> list[Any]:
            gathered.append(value)
            values = super().gather(value) if len(gathered) < 3 else []
            if len(gathered) == (2 if lost_in == "writing" else 3):
                await_event(moving)
                assert self.exchange is not None
                self.exchange.lose_one()
                raise PeerLost("rank 2 has ended")
            return values

    def save(ranks: Participants) -> None:
        try:
            mine = checkpoint(target, 2.0 + ranks.topology.rank)
            files = mine.files if ranks.place == 0 else [random_states_file(1, 0)]
            replace(mine, files=files).write(ranks)
        finally:
            left.set() if ranks.place == 1 else None

    gathered: list[Any] = []
    monkeypatch.setattr(saving, "commit", paused)
    first, second = ranks_of([0, 1])
    found = outcomes([first, Waiting(second.topology, exchange=second.exchange)], save)
    assert [type(one) for one in found] == [PeerLost, PeerLost]
    assert why_not_whole(target, Participants()) is None
    manifest = read_manifest(target)
    assert manifest is not None
    assert sorted(manifest.files) == ["model.safetensors", "random_states_0.pkl", "random_states_1.pkl"]
    assert (target / "by_a_hook").exists() == (before == "files of hooks")
    assert os.listdir(tmp_path) == ["c"]


def test_each_host_checks_the_files_of_its_own_disk(tmp_path: Path) -> None:
    """What all hosts save may differ: running statistics of the model, objects of the program."""
    targets = [tmp_path / host / "c" for host in "aabb"]

    def save(ranks: Participants) -> None:
        files = [random_states_file(ranks.place, 0)]
        if ranks.topology.local_rank == 0:
            files += checkpoint(tmp_path, value=float(ranks.place)).files[:1]
        mine = replace(checkpoint(targets[ranks.place]), files=files, on_each_node=True)
        mine.write(ranks)

    assert outcomes(ranks_of([0, 0, 1, 1]), save) == [None] * 4
    assert [why_not_whole(target, Participants()) for target in targets] == [None] * 4


@pytest.mark.parametrize("differs", [False, True])
def test_hosts_that_share_a_disk_may_not_write_different_files_under_one_name(tmp_path: Path, differs: bool) -> None:
    target = tmp_path / "c"
    checkpoint(target, value=7.0).write(Participants())

    def save(ranks: Participants) -> None:
        files = checkpoint(target, value=float(ranks.place) if differs else 1.0).files[:1]
        replace(checkpoint(target), files=files, on_each_node=True).write(ranks)

    found = outcomes(ranks_of([0, 1]), save)
    assert why_not_whole(target, Participants()) is None
    assert os.listdir(tmp_path) == ["c"]
    if differs:
        assert "rank 0 and rank 1 have written different files under this name" in str(found[0])
        assert isinstance(found[1], OtherRankFailed)
    else:
        assert found == [None] * 2


class Shards:
    """A folder of which each rank writes its part."""

    name, content = "shards", ()

    def __init__(self, place: int) -> None:
        self._file = StateFile(f"part_{place}", {"a": torch.full((4,), float(place))}, safe=True)

    def write(self, folder: Path) -> tuple[dict[str, FileRecord], list[Any]]:
        (folder / self.name).mkdir(exist_ok=True)
        return {f"{self.name}/{self._file.name}": self._file.write(folder / self.name)}, []

    def write_index(self, folder: Path, places: Any) -> dict[str, FileRecord]:
        return {f"{self.name}/index": StateFile("index", {}).write(folder / self.name)}


@pytest.mark.parametrize("on_each_node", [False, True])
def test_shards_on_several_disks_are_refused_while_the_checkpoint_before_is_there(
    tmp_path: Path, on_each_node: bool
) -> None:
    targets = [tmp_path / host / "checkpoint_1" for host in "ab"]
    checkpoint(targets[0].with_name("checkpoint_0")).write(Participants())

    def save(ranks: Participants) -> None:
        folders: Any = [Shards(ranks.place)]
        mine = checkpoint(targets[ranks.place], limit=1)
        replace(mine, files=mine.files[1:], folders=folders, on_each_node=on_each_node).write(ranks)

    found = outcomes(ranks_of([0, 1]), save)
    if on_each_node:
        assert found == [None] * 2
        names = [sorted(path.name for path in (target / "shards").iterdir()) for target in targets]
        assert names == [["index", "part_0"], ["part_1"]]
        assert [why_not_whole(target, Participants()) for target in targets] == [None] * 2
    else:
        assert "rank 1 has written its part of the state to another disk than rank 0" in str(found[0])
        assert [os.listdir(target.parent) for target in targets] == [["checkpoint_0"], []]


def test_a_host_removes_older_checkpoints_only_when_all_have_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders, commit = [tmp_path / "a", tmp_path / "b"], saving.commit

    def save(ranks: Participants, number: int) -> None:
        files = [random_states_file(ranks.place, 0)]
        replace(checkpoint(folders[ranks.place] / f"checkpoint_{number}", limit=1), files=files).write(ranks)

    def refuses(temporary: Path, target: Path) -> None:
        if target == folders[1] / "checkpoint_1":
            raise SystemFailure(errno.ENOSPC, "no space left")
        commit(temporary, target)

    monkeypatch.setattr(saving, "commit", refuses)
    assert outcomes(ranks_of([0, 1]), lambda ranks: save(ranks, 0)) == [None] * 2
    assert None not in outcomes(ranks_of([0, 1]), lambda ranks: save(ranks, 1))
    assert [sorted(os.listdir(folder)) for folder in folders] == [["checkpoint_0", "checkpoint_1"], ["checkpoint_0"]]
    assert outcomes(ranks_of([0, 1]), lambda ranks: save(ranks, 2)) == [None] * 2
    assert [os.listdir(folder) for folder in folders] == [["checkpoint_2"]] * 2


def test_of_hosts_that_share_another_disk_than_the_first_one_moves_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = [tmp_path / host / "c" for host in "abb"]

    def save(ranks: Participants) -> None:
        replace(checkpoint(targets[ranks.place]), files=[random_states_file(ranks.place, 0)]).write(ranks)

    for _ in range(2):
        assert outcomes(ranks_of([0, 1, 2]), save) == [None] * 3
        assert sorted(os.listdir(targets[1])) == ["accelerate_cpp.json", "random_states_1.pkl", "random_states_2.pkl"]
        assert [why_not_whole(target, Participants()) for target in targets] == [None] * 3
    assert "rank 1 writes to another disk than rank 0, where the model is" in caplog.text


@pytest.mark.parametrize("fails", ["writing on 0", "writing on 1", "moving on 0", "moving on 1"])
def test_a_failure_leaves_nothing_on_any_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Each host has a disk of its own; on the second one hooks have begun a folder that the first one had before."""
    phase, failing = fails.split()[0], int(fails.split()[-1])
    targets, commit = [tmp_path / "a" / "c", tmp_path / "b" / "c"], saving.commit
    checkpoint(targets[0]).write(Participants())
    begin(targets[1])

    def save(ranks: Participants) -> None:
        kind = Unwritable if (phase, failing) == ("writing", ranks.place) else StateFile
        files = [kind(f"optimizer_{ranks.place}.bin", {}), random_states_file(ranks.place, 0)]
        replace(checkpoint(targets[ranks.place]), files=files).write(ranks)

    def refuses(temporary: Path, target: Path) -> None:
        if (phase, target) == ("moving", targets[failing]):
            raise SystemFailure(errno.ENOSPC, "no space left")
        commit(temporary, target)

    monkeypatch.setattr(saving, "commit", refuses)
    found = outcomes(ranks_of([0, 1]), save)
    assert [type(one) for one in found] == [SystemFailure if rank == failing else OtherRankFailed for rank in (0, 1)]
    assert [os.listdir(target.parent) for target in targets] == [["c"], []]
    assert why_not_whole(targets[0], Participants()) is None


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
