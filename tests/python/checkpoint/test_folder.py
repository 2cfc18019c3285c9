"""Folders that appear whole, replace others in one step, and go when there are too many."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.checkpoint import folder
from accelerate_cpp.checkpoint.files import write_bytes
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, Manifest
from accelerate_cpp.errors import SystemFailure


def checkpoint(path: Path, files: dict[str, str]) -> Path:
    path.mkdir(parents=True)
    records = {name: write_bytes(path / name, text.encode()) for name, text in files.items()}
    Manifest(1, 1, records, []).write(path)
    return path


def contents(path: Path) -> dict[str, str]:
    names = (os.path.relpath(os.path.join(parent, name), path) for parent, _, all in os.walk(path) for name in all)
    return {name: (path / name).read_text() for name in names if name != MANIFEST_NAME}


def test_a_new_checkpoint_gets_its_name(tmp_path: Path) -> None:
    target = tmp_path / "c"
    folder.commit(checkpoint(folder.temporary_folder(target, "1"), {"a": "1"}), target)
    assert contents(target) == {"a": "1"}
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("system_can_swap", [True, False])
def test_another_save_into_a_folder_replaces_its_files_and_keeps_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system_can_swap: bool
) -> None:
    if not system_can_swap:
        monkeypatch.setattr(folder.ctypes, "CDLL", lambda *_args, **_kwargs: object())
    target = checkpoint(tmp_path / "c", {"a": "old", "stale": "old", "rewritten": "old"})
    (target / "sub").mkdir()
    (target / "sub" / "notes").write_text("mine")
    (target / "config").write_text("mine")
    manifest_time = (target / MANIFEST_NAME).stat().st_mtime_ns
    (target / "rewritten").write_text("by a hook")
    os.utime(target / "rewritten", ns=(manifest_time + 1, manifest_time + 1))
    folder.commit(checkpoint(folder.temporary_folder(target, "2"), {"a": "new"}), target)
    assert contents(target) == {"a": "new", "sub/notes": "mine", "config": "mine", "rewritten": "by a hook"}
    assert os.listdir(tmp_path) == ["c"]


def test_what_comes_while_a_folder_is_replaced_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, exchange = checkpoint(tmp_path / "c", {"a": "old"}), folder._exchange

    def late(first: Path, second: Path) -> None:
        (target / "log").write_text("mine")
        exchange(first, second)

    monkeypatch.setattr(folder, "_exchange", late)
    folder.commit(checkpoint(folder.temporary_folder(target, "2"), {"b": "new"}), target)
    assert contents(target) == {"b": "new", "log": "mine"}
    assert os.listdir(tmp_path) == ["c"]


def test_another_save_does_not_wait_for_a_pipe_in_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = checkpoint(tmp_path / "c", {"a": "old"})
    (target / "sub").mkdir()
    os.mkfifo(target / "sub" / "pipe")
    (target / "link").symlink_to("a")
    new = checkpoint(folder.temporary_folder(target, "2"), {"a": "new"})
    os.mkfifo(new / "of-a-hook")
    folder.commit(new, target)
    assert sorted(os.listdir(target)) == ["a", MANIFEST_NAME, "link", "of-a-hook", "sub"]
    assert os.listdir(target / "sub") == []
    assert f"{target / 'sub' / 'pipe'} is a pipe, a socket or a device" in caplog.text
    assert len(caplog.records) == 1


def test_leftovers_of_the_same_name_go_and_nothing_else(tmp_path: Path) -> None:
    for name in (".checkpoint_3.tmp-aa", ".checkpoint_4.tmp-bb", "checkpoint_2", ".other.tmp-aa", "checkpoint_3.tmp-x"):
        (tmp_path / name).mkdir()
    folder.remove_leftovers(tmp_path / "checkpoint_4", tmp_path / ".checkpoint_4.tmp-bb", of_all_numbers=True)
    assert sorted(os.listdir(tmp_path)) == [
        ".checkpoint_4.tmp-bb",
        ".other.tmp-aa",
        "checkpoint_2",
        "checkpoint_3.tmp-x",
    ]
    folder.remove_leftovers(tmp_path / "other")
    assert not (tmp_path / ".other.tmp-aa").exists()
    folder.remove_leftovers(tmp_path / "missing" / "c")


def test_a_run_that_names_its_folders_leaves_those_of_others_alone(tmp_path: Path) -> None:
    """As in a sweep, whose runs save to ``checkpoint_<seed>`` side by side."""
    for name in (".checkpoint_3.tmp-aa", ".checkpoint_4.tmp-bb"):
        (tmp_path / name).mkdir()
    folder.begin(tmp_path / "checkpoint_5")
    folder.remove_leftovers(tmp_path / "checkpoint_4")
    assert sorted(os.listdir(tmp_path)) == [".checkpoint_3.tmp-aa", "checkpoint_5"]


def test_the_names_of_new_folders_are_brought_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(folder, "sync_folder", synced.append)
    folder.make_folder(tmp_path / "run" / "checkpoints" / "c")
    assert (tmp_path / "run" / "checkpoints" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "run", tmp_path / "run" / "checkpoints"]
    folder.make_folder(tmp_path / "run" / "checkpoints" / "c")
    assert len(synced) == 3


def test_what_hooks_of_a_killed_save_wrote_is_no_checkpoint_and_goes_with_the_next(tmp_path: Path) -> None:
    for number in (1, 2):
        checkpoint(tmp_path / f"checkpoint_{number}", {"a": "1"})
    folder.begin(tmp_path / "checkpoint_3")
    (tmp_path / "checkpoint_3" / "of a hook").touch()
    assert folder.is_unfinished(tmp_path / "checkpoint_3")
    assert list(folder.numbered(tmp_path)) == [1, 2]
    folder.prune(tmp_path, 2, newest=tmp_path / "checkpoint_2")
    assert list(folder.numbered(tmp_path)) == [1, 2], "it takes the place of none"
    folder.remove_leftovers(tmp_path / "checkpoint_3", keep=tmp_path / ".checkpoint_3.tmp-aa")
    assert (tmp_path / "checkpoint_3" / "of a hook").exists(), "the save is under way"
    folder.remove_leftovers(tmp_path / "checkpoint_4", of_all_numbers=True)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_1", "checkpoint_2"]


def test_a_checkpoint_that_hooks_began_is_finished_by_its_move(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint_3"
    folder.begin(target)
    (target / "of a hook").write_text("mine")
    folder.commit(checkpoint(folder.temporary_folder(target, "1"), {"a": "1"}), target)
    assert contents(target) == {"a": "1", "of a hook": "mine"}
    assert list(folder.numbered(tmp_path)) == [3]
    assert os.listdir(tmp_path) == ["checkpoint_3"]
    folder.begin(tmp_path / "checkpoint_4")
    shutil.copytree(target, tmp_path / "checkpoint_4", dirs_exist_ok=True)  # by the user, over what is left
    folder.remove_leftovers(tmp_path / "checkpoint_5", of_all_numbers=True)
    assert list(folder.numbered(tmp_path)) == [3, 4]


@pytest.mark.parametrize("name", ["c", "checkpoint_3"])
def test_a_folder_that_takes_the_place_of_an_unfinished_one_is_kept(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    folder.begin(target)
    shutil.rmtree(target)
    shutil.copytree(checkpoint(tmp_path / "of the original", {"a": "1"}), target)
    (target / MANIFEST_NAME).unlink()
    folder.remove_leftovers(target)
    folder.remove_leftovers(tmp_path / "checkpoint_4", of_all_numbers=True)
    assert not folder.is_unfinished(target)
    assert contents(target) == {"a": "1"}


def test_what_a_killed_save_with_hooks_has_left_in_the_current_folder_goes_and_the_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.begin(tmp_path / "c")
    (tmp_path / "c" / "sub").mkdir()
    (tmp_path / "c" / "by_a_hook").touch()
    monkeypatch.chdir(tmp_path / "c")
    folder.remove_leftovers(tmp_path / "c")
    assert os.listdir(Path.cwd()) == []


def test_a_folder_that_is_there_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    folder.begin(tmp_path / "c")
    assert not folder.is_unfinished(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_processes_that_begin_a_folder_at_once_find_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, rename = tmp_path / "c", os.rename

    def late(source: Path, destination: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        folder.begin(target)
        (target / "of another").touch()
        rename(source, destination)

    monkeypatch.setattr(os, "rename", late)
    folder.begin(target)
    assert folder.is_unfinished(target)
    assert (target / "of another").exists()
    assert os.listdir(tmp_path) == ["c"]


def test_a_folder_that_cannot_be_begun_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "c").touch()
    with pytest.raises(SystemFailure, match=f"while making {tmp_path / 'c'}"):
        folder.begin(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_an_unfinished_folder_that_is_only_half_removed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, remove = tmp_path / "checkpoint_3", shutil.rmtree
    folder.begin(target)
    (target / "of a hook").touch()

    def killed(path: Path, ignore_errors: bool) -> None:
        for one in path.glob(".*"):
            one.unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.remove_leftovers(target)
    assert folder.numbered(tmp_path) == {}
    monkeypatch.setattr(shutil, "rmtree", remove)
    folder.remove_leftovers(target)
    assert os.listdir(tmp_path) == []


def test_checkpoints_are_ordered_by_number_and_foreign_names_left_out(tmp_path: Path) -> None:
    for name in ("checkpoint_10", "checkpoint_9", "checkpoint_best", "notes", ".checkpoint_11.tmp-aa"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint_12").write_text("a file")
    assert list(folder.numbered(tmp_path)) == [9, 10]
    assert folder.numbered(tmp_path / "missing") == {}


@pytest.mark.parametrize(("limit", "left"), [(0, [4]), (1, [4]), (2, [4, 12]), (9, [2, 3, 4, 12])])
def test_the_lowest_numbers_are_pruned_but_never_the_new_one(tmp_path: Path, limit: int, left: list[int]) -> None:
    for number in (2, 3, 4, 12):
        (tmp_path / f"checkpoint_{number}").mkdir()
    folder.prune(tmp_path, limit, newest=tmp_path / "checkpoint_4")
    remaining = list(folder.numbered(tmp_path))
    assert 4 in remaining
    if limit > 1:
        assert remaining[-1] == 12
    assert set(left) <= set(remaining)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("over_nfs", [False, True])
def test_large_contents_of_pruned_checkpoints_are_let_go_of(
    tmp_path: Path, over_nfs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    doomed = tmp_path / "checkpoint_0"
    doomed.mkdir()
    (doomed / "large").write_bytes(bytes(2 << 20))
    (tmp_path / "checkpoint_1").mkdir()
    large = os.stat(doomed / "large").st_ino
    held: list[bool] = []
    remove = shutil.rmtree

    def removes(path: Path, ignore_errors: bool) -> None:
        assert ignore_errors
        held.append(large in open_files())
        if not (over_nfs and held[-1]):  # where a name of an open file would be left
            remove(path)

    monkeypatch.setattr(shutil, "rmtree", removes)
    folder.prune(tmp_path, 1, newest=tmp_path / "checkpoint_1")
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    for thread in threading.enumerate():
        if thread.name == "checkpoint-pruner":
            thread.join()
    assert large not in open_files()
    assert held == ([True, False] if over_nfs else [True])


def test_large_contents_are_let_go_of_where_no_thread_starts_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    for number in range(2):
        (tmp_path / f"checkpoint_{number}").mkdir()
    (tmp_path / "checkpoint_0" / "large").write_bytes(bytes(2 << 20))
    large = os.stat(tmp_path / "checkpoint_0" / "large").st_ino
    monkeypatch.setattr(threading.Thread, "start", refuses)
    folder.prune(tmp_path, 1, newest=tmp_path / "checkpoint_1")
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    assert large not in open_files()


def test_what_others_hold_open_over_nfs_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / f"checkpoint_{number}").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    folder.prune(tmp_path, 1, newest=tmp_path / "checkpoint_1")
    assert list(folder.numbered(tmp_path)) == [1]


def test_a_child_does_not_keep_what_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doomed = tmp_path / "checkpoint_0"
    doomed.mkdir()
    (doomed / "large").write_bytes(bytes(2 << 20))
    (tmp_path / "checkpoint_1").mkdir()
    large = os.stat(doomed / "large").st_ino
    forked = threading.Event()
    let_go = folder._let_go

    def late(descriptors: set[int]) -> None:
        forked.wait()
        let_go(descriptors)

    monkeypatch.setattr(folder, "_let_go", late)
    folder.prune(tmp_path, 1, newest=tmp_path / "checkpoint_1")
    monkeypatch.setattr(folder, "_let_go", let_go)
    assert large in open_files()
    child = os.fork()
    if child == 0:
        os._exit(large in open_files())
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def open_files() -> set[int]:
    """The inodes of the files that this process has open."""
    inodes = set()
    for descriptor in os.listdir("/dev/fd"):
        with suppress(OSError):
            inodes.add(os.fstat(int(descriptor)).st_ino)
    return inodes


@pytest.mark.parametrize("made", ["nothing", "an empty folder", "a folder with a file"])
def test_a_process_killed_between_two_renames_has_lost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at_the_second: Any, made: str
) -> None:
    """Where the system cannot swap folders; a script may make its output folder before it looks for a checkpoint."""
    monkeypatch.setattr(folder.ctypes, "CDLL", lambda *_arguments, **_options: object())
    target = checkpoint(tmp_path / "c", {"a": "1"})
    end_of_death = dies_at_the_second("rename")
    with pytest.raises(KeyboardInterrupt):
        folder.commit(checkpoint(folder.temporary_folder(target, "1"), {"a": "2"}), target)
    end_of_death()
    assert not target.exists()
    if made != "nothing":
        target.mkdir()
    if made == "a folder with a file":
        (target / "log").write_text("0")
    folder.remove_leftovers(target)
    if made == "a folder with a file":
        assert contents(folder._set_aside(target)) == {"a": "1"}
        assert contents(target) == {"log": "0"}
        folder.commit(checkpoint(folder.temporary_folder(target, "2"), {"a": "3"}), target)
        assert contents(target) == {"a": "3", "log": "0"}
    else:
        assert contents(target) == {"a": "1"}
    assert os.listdir(tmp_path) == ["c"]


def test_a_child_that_is_forked_while_a_removed_file_is_freed_closes_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file may get the number of the descriptor before its close has ended."""
    (tmp_path / "large").touch()
    held = {os.open(tmp_path / "large", os.O_RDONLY)}
    folder._held.update(held)
    close, known = os.close, []

    def slow_close(descriptor: int) -> None:
        known.append(descriptor in folder._held)
        close(descriptor)

    monkeypatch.setattr(folder.os, "close", slow_close)
    folder._let_go(held)
    assert known == [False]
