"""Checkpoints in folders that stay themselves: the one in which the program works, mount points, and links."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.checkpoint import folder, in_place
from accelerate_cpp.checkpoint.files import write_bytes
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, Manifest, check_files, files_as_written, read_manifest
from accelerate_cpp.errors import CheckpointError, SystemFailure


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)  # takes the disk a while


def checkpoint(path: Path, files: dict[str, str]) -> Path:
    records = {}
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        records[name] = write_bytes(path / name, text.encode())
    Manifest(1, 1, records, []).write(path)
    return path


def whole(path: Path) -> dict[str, str]:
    """The files of ``path``, which has to be a whole checkpoint."""
    manifest = read_manifest(path)
    assert manifest is not None
    check_files(path, manifest)
    names = (os.path.relpath(os.path.join(parent, name), path) for parent, _, all in os.walk(path) for name in all)
    return {name: (path / name).read_text() for name in sorted(names) if name != MANIFEST_NAME}


def earlier(path: Path) -> Path:
    """A checkpoint with files of the user."""
    target = checkpoint(path, {"a": "old", "shards/1": "old", "shards/2": "old", "stale": "old"})
    (target / "notes").write_text("mine")
    return target


def new(target: Path) -> Path:
    return checkpoint(folder.temporary_folder(target, "1", in_place=True), {"a": "new", "shards/1": "new", "b": "new"})


BEFORE = {"a": "old", "notes": "mine", "shards/1": "old", "shards/2": "old", "stale": "old"}
AFTERWARDS = {"a": "new", "b": "new", "notes": "mine", "shards/1": "new"}


def test_the_folder_stays_itself_and_has_the_files_of_the_new_checkpoint_and_of_the_user(tmp_path: Path) -> None:
    target = earlier(tmp_path / "c")
    itself = target.stat().st_ino
    folder.commit(new(target), target)
    assert whole(target) == AFTERWARDS
    assert target.stat().st_ino == itself
    assert sorted(os.listdir(target)) == ["a", MANIFEST_NAME, "b", "notes", "shards"]
    assert os.listdir(tmp_path) == ["c"]


class Killed(BaseException):
    pass


@contextmanager
def before_call(number: int, act: Callable[[], Any]) -> Iterator[list[int]]:
    """Calls ``act`` before that call of the system that looks at files or changes them; yields how many are left."""
    left, acts = [number], [act]

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0 and acts:
                acts.pop()()
            elif acts:
                left[0] -= 1
            return real(*arguments, **options)

        return attempt

    with pytest.MonkeyPatch.context() as patched:
        for name in ("rename", "replace", "rmdir", "unlink", "mkdir", "stat", "lstat", "fsync"):
            patched.setattr(os, name, counted(getattr(os, name)))
        patched.setattr(io, "open", counted(io.open))
        yield left


def killed() -> None:
    raise Killed


def was_killed(call: int, work: Callable[[], Any]) -> bool:
    with before_call(call, killed):
        try:
            work()
        except Killed:
            return True
    return False


def test_what_a_killed_process_has_begun_is_ended_by_the_next(tmp_path: Path) -> None:
    """Killed before each of its calls; the clock was set back before the save."""
    found = []
    for call in itertools.count():
        target = earlier(tmp_path / str(call))
        temporary = new(target)
        for path in temporary.rglob("*"):
            os.utime(path, (1, 1))
        is_whole = not was_killed(call, partial(folder.commit, temporary, target))
        folder.remove_leftovers(target)
        found.append(whole(target))
        if is_whole:
            break
    assert [*dict.fromkeys(map(str, found))] == [str(BEFORE), str(AFTERWARDS)]
    assert found.count(AFTERWARDS) > 10


@pytest.mark.parametrize("other_is_killed", [False, True])
def test_two_processes_may_end_it_at_once(tmp_path: Path, other_is_killed: bool) -> None:
    """The second comes before any call of the first, and ends it, or is killed before any of its own."""
    template = earlier(tmp_path / "template")
    assert was_killed(25, partial(folder.commit, new(template), template))
    assert (template / in_place._COMPLETE).is_dir()
    for first, second in itertools.product(range(0, 200, 2), range(3, 60, 12) if other_is_killed else [0]):
        target = Path(shutil.copytree(template, tmp_path / f"{first}-{second}"))
        go_on = partial(in_place.go_on, target)
        with before_call(first, partial(was_killed, second, go_on) if other_is_killed else go_on) as left:
            go_on()
        assert whole(target) == AFTERWARDS
        if left[0] > 0:
            break
    assert left[0] > 0
    assert first > 20


def test_a_folder_that_another_process_removes_while_it_is_empty_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, replace = checkpoint(tmp_path / "c", {"a": "old"}), os.replace
    removed = []

    def late(source: Path, place: Path) -> None:
        if place.parent.name == "shards" and not removed:
            removed.append(place.parent.rmdir())
        replace(source, place)

    monkeypatch.setattr(os, "replace", late)
    folder.commit(new(target), target)
    assert removed == [None]
    assert whole(target) == {"a": "new", "b": "new", "shards/1": "new"}


@pytest.mark.parametrize("obstacle", ["a", "shards"])
def test_what_is_in_the_way_is_an_error_that_changes_nothing(tmp_path: Path, obstacle: str) -> None:
    target = checkpoint(tmp_path / "c", {"old": "old"})
    if obstacle == "a":
        (target / "a").mkdir()
    else:
        (target / "shards").symlink_to(tmp_path)
    with pytest.raises(SystemFailure, match=f"{target / obstacle} is (a|no) folder: remove it"):
        folder.commit(new(target), target)
    folder.remove_leftovers(target)
    assert whole(target) == {"old": "old"}


def test_nothing_is_taken_from_elsewhere_or_removed_there(tmp_path: Path) -> None:
    """As folders that come from others may have it."""
    elsewhere = checkpoint(tmp_path / "elsewhere", {"a": "theirs", "1": "theirs"})
    hostile = checkpoint(tmp_path / "hostile", {"shards/1": "theirs"})
    (hostile / in_place._COMPLETE).symlink_to(elsewhere)
    folder.put_back(hostile)
    assert whole(elsewhere) == {"1": "theirs", "a": "theirs"}

    (hostile / in_place._COMPLETE).unlink()
    shutil.rmtree(hostile / "shards")
    (hostile / "shards").symlink_to(elsewhere)
    checkpoint(hostile / in_place._COMPLETE, {"b": "new"})
    folder.put_back(hostile)
    assert whole(elsewhere) == {"1": "theirs", "a": "theirs"}

    checkpoint(hostile / in_place._COMPLETE, {"shards/b": "new"})
    with pytest.raises(SystemFailure, match="shards is no folder"):
        folder.put_back(hostile)
    assert whole(elsewhere) == {"1": "theirs", "a": "theirs"}


def test_nothing_is_removed_from_the_cache_of_a_hub(tmp_path: Path) -> None:
    """Whose files may be read through links."""
    (tmp_path / "model" / "snapshots").mkdir(parents=True)
    cache = checkpoint(tmp_path / "model" / "blobs", {"a": "theirs"})
    hostile = checkpoint(tmp_path / "hostile", {"shards/a": "theirs"})
    shutil.rmtree(hostile / "shards")
    (hostile / "shards").symlink_to(cache)
    checkpoint(hostile / in_place._COMPLETE, {"b": "new"})
    assert str(hostile / "shards" / "a") in files_as_written(hostile)
    folder.put_back(hostile)
    assert whole(cache) == {"a": "theirs"}


def test_a_complete_checkpoint_that_cannot_be_read_is_told_and_kept(tmp_path: Path) -> None:
    target = earlier(tmp_path / "c")
    new(target).rename(target / in_place._COMPLETE)
    (target / in_place._COMPLETE / MANIFEST_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match=f"{in_place._COMPLETE} is a checkpoint that a killed save was moving"):
        folder.put_back(target)
    assert (target / in_place._COMPLETE / "a").exists()


def test_what_a_killed_process_has_written_before_it_was_complete_goes(tmp_path: Path) -> None:
    target = earlier(tmp_path / "c")
    new(target)
    folder.remove_leftovers(target)
    assert whole(target) == BEFORE


PROGRAM = """
import os, sys, torch
from accelerate_cpp import Accelerator
accelerator = Accelerator(cpu=True)
model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
seen = []
accelerator.register_save_state_pre_hook(lambda _models, _weights, folder: seen.append(folder))
for place in sys.argv[1:]:
    for value in (1.0, 2.0, 0.0):
        with torch.no_grad():
            model.weight.fill_(value)
        if value > 0:
            assert str(accelerator.save_state(place)) == place
    accelerator.load_state(place)
    assert model.weight.item() == 2.0
    assert seen[-1] == place
    print(*sorted(os.listdir(place)))
"""
FILES = [MANIFEST_NAME, "model.safetensors", "random_states_0.pkl"]


def _run(command: list[str], within: Path) -> list[list[str]]:
    """The files that the program finds in the folders into which it has saved."""
    done = subprocess.run(command, cwd=within, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_program_saves_into_the_folder_in_which_it_works_and_through_links(tmp_path: Path) -> None:
    for name in ("work", "disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("disk")
    places = [".", str(tmp_path / "work"), "../link", ".."]
    found = _run([sys.executable, "-c", PROGRAM, *places], tmp_path / "work")
    assert found == [FILES, FILES, FILES, sorted([*FILES, "disk", "link", "work"])]
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path / "disk")) == FILES


def _mounts(tmp_path: Path, kind: str) -> list[str]:
    """A command that runs another one with something mounted at ``mounted``."""
    mount = 'mount -t tmpfs none "$0"' if kind == "file system" else 'mount --bind "$0/../other" "$0"'
    (tmp_path / "other").mkdir()
    (tmp_path / "mounted").mkdir()
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', str(tmp_path / "mounted")]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    return command


@pytest.mark.parametrize("kind", ["file system", "folder"])
def test_program_saves_to_where_something_is_mounted(tmp_path: Path, kind: str) -> None:
    mounted = _mounts(tmp_path, kind)
    place = tmp_path / "mounted"
    assert _run([*mounted, sys.executable, "-c", PROGRAM, str(place)], tmp_path) == [FILES]
    assert sorted(os.listdir(tmp_path)) == ["mounted", "other"]
    assert os.listdir(place) == []
