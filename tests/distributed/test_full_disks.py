"""A disk that is full, cannot be written or is gone, at every place of a save: an error on all ranks, and no harm."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import sandbox
from faults import await_true
from killed_saves import ENGINES, SHARDED, Oracle, Training
from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

pytestmark = pytest.mark.skipif(not sandbox.may_have_own_mounts(), reason="this user may not mount")
DISK, FILES, PAGE = 64 << 20, 4096, 4096


class Disk:
    """A small file system that all ranks share, with the checkpoints of a run, and room that can be taken."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder, "disk")
        self._ballast = self.folder / "ballast"
        said, rank = Path(folder, "mounted"), int(os.environ["RANK"])
        if rank == 0:
            self.folder.mkdir()
            sandbox.mount_small_disk(str(self.folder), DISK, FILES)
            self._ballast.mkdir()
            Path(f"{said}.part").write_text(str(os.getpid()))
            os.rename(f"{said}.part", said)
        else:
            await_true(said.exists, "the disk")
            sandbox.share_mounts_of(int(said.read_text()))

    def leave(self, *, pages: int | None = None, files: int | None = None) -> None:
        """Takes all room but this. Of rank 0 alone."""
        self.give_back()
        if files is not None:
            for number in range(os.statvfs(self.folder).f_favail - files):
                (self._ballast / str(number)).touch()
        if pages is not None:
            with (self._ballast / "large").open("wb", buffering=0) as file:
                os.posix_fallocate(file.fileno(), 0, (os.statvfs(self.folder).f_bavail - pages) * PAGE)

    def give_back(self) -> None:
        for path in self._ballast.iterdir():
            path.unlink()


def names(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


class Saves:
    """A run on a small disk that tries to save, and is checked after each failure."""

    def __init__(self, folder: str, layout: str, blocking: bool) -> None:
        self.disk = Disk(folder)
        self.training = Training(layout, str(self.disk.folder))
        self.run, self._blocking = self.training.run, blocking
        self.checkpoints = self.disk.folder / "checkpoints"
        self.training.step()
        self.run.save_state()
        self.before = names(self.checkpoints)

    def on_main(self, action: Callable[[], Any]) -> None:
        if self.run.is_main_process:
            action()
        self.run.wait_for_everyone()

    def save(self) -> str | None:
        """Trains a step and tries to save; returns the error as ``Class: text``."""
        self.training.step()
        self.run.wait_for_everyone()
        try:
            self.run.save_state(blocking=self._blocking)
            if not self._blocking:
                self.training.step()  # goes on meanwhile
                self.run.wait_for_checkpoint()
        except Exception as error:
            self.run.wait_for_everyone()
            assert names(self.checkpoints) == self.before, "a failure leaves nothing, and takes nothing away"
            return f"{type(error).__name__}: {error}"
        self.run.wait_for_everyone()
        return None

    def goes_on(self) -> None:
        """What failed has not disturbed the training."""
        self.training.step()
        self.training.check()

    def remove_later_ones(self) -> None:
        for name in set(names(self.checkpoints)) - set(self.before):
            shutil.rmtree(self.checkpoints / name)

    def goes_back(self) -> None:
        """The checkpoint from before the failures is loaded; it can be saved again."""
        self.run.load_state()
        assert self.training.progress.steps == 1, "it was saved after a step"
        self.training.oracle = Oracle()
        self.training.check()
        self.goes_on()
        assert self.save() is None
        assert set(names(self.checkpoints)) > set(self.before)


def fills(folder: str, layout: str, blocking: bool) -> list[str]:
    """The errors of saves that are left a page more each time, then a file more, until they succeed."""
    saves, errors = Saves(folder, layout, blocking), []
    for unit in ("pages", "files"):
        for left in range(FILES):
            saves.on_main(partial(saves.disk.leave, **{unit: left}))
            error = saves.save()
            if error is None:
                break
            errors.append(error)
            step = saves.training.progress.steps
            if left % 8 == 0:
                saves.goes_on()
                assert step < saves.training.progress.steps
        assert left > 3, f"{unit}: the save took none"
        saves.on_main(saves.disk.give_back)
        saves.on_main(saves.remove_later_ones)
    saves.goes_back()
    return errors


def placed(errors: list[str]) -> set[str]:
    """The files and folders at which the disk was full, without their ranks."""
    found = (re.search(r"\.tmp-\w+(?P<rest>[^ ,;:)\']*)", error) for error in errors)
    return {re.sub(r"\d", "N", match["rest"].rpartition("/")[2]) for match in found if match is not None}


BLOCKING = pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "in the background"])
LONG = pytest.mark.long
LAYOUTS = ["FSDP2 in shards", *(pytest.param(one, marks=LONG) for one in ("plain", *SHARDED[1:], *ENGINES))]


def told_by(ranks: Sequence[str | None], error: int, *parts: str) -> None:
    """All ranks have failed by an error of the system, and each of them says all of it."""
    assert None not in ranks
    errors = [str(one) for one in ranks]
    kinds = [one.partition(":")[0] for one in errors]
    assert set(kinds) <= {"SystemFailure", "OtherRankFailed"}, errors
    assert "SystemFailure" in kinds, errors
    for rank, told in enumerate(errors):
        for part in (f"[Errno {error}] {os.strerror(error)} while ", "bytes of tensors", *parts):
            assert part in told, (part, told)
        if kinds[rank] == "OtherRankFailed":
            assert f"rank {1 - rank} failed with SystemFailure" in told, told


@pytest.mark.parametrize(
    "blocking", [pytest.param(True, id="blocking"), pytest.param(False, id="in the background", marks=LONG)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_is_an_error_on_all_ranks_wherever_it_comes(tmp_path: Path, layout: str, blocking: bool) -> None:
    if layout in ENGINES and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    ranks = run_processes(fills, 2, str(tmp_path), layout, blocking, timeout=600)
    for errors in zip(*ranks, strict=True):
        told_by(errors, errno.ENOSPC, "make room or choose another folder", "the disk has room for")
    at = placed([error for errors in ranks for error in errors])
    # The folder, and what rank 0 writes last and alone; which of the others meets it is a race of ranks and threads.
    in_one_file = layout in ("plain", "FSDP2 whole")
    large = "model_states.pt" if layout in ENGINES else "optimizer.bin" if in_one_file else ".metadata"
    assert {"", "accelerate_cpp.json"} <= at, at
    assert any(name.endswith(large) for name in at), at


def cannot_write(folder: str, layout: str, blocking: bool) -> str | None:
    saves = Saves(folder, layout, blocking)
    disk = str(saves.disk.folder)
    saves.on_main(lambda: sandbox.forbid_writing(disk))
    error = saves.save()
    saves.on_main(lambda: sandbox.forbid_writing(disk, forbidden=False))
    saves.goes_on()
    saves.goes_back()
    return error


@BLOCKING
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_disk_that_can_only_be_read_is_an_error_on_all_ranks(tmp_path: Path, layout: str, blocking: bool) -> None:
    if layout in ENGINES and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    told = run_processes(cannot_write, 2, str(tmp_path), layout, blocking, timeout=600)
    told_by(told, errno.EROFS, "make the folder one that this user may write, or choose another")


def loses_its_disk(folder: str, layout: str, blocking: bool, moment: str) -> str | None:
    """The file system vanishes before rank 0 writes its files, or before it moves the folder to its place."""
    from accelerate_cpp.checkpoint.writing import Checkpoint

    saves = Saves(folder, layout, blocking)
    step = getattr(Checkpoint, moment)

    def taken_away(*args: Any) -> Any:
        sandbox.take_away(str(saves.disk.folder))
        return step(*args)

    if saves.run.is_main_process:
        setattr(Checkpoint, moment, taken_away)
    saves.before = []  # what is left is the folder below
    error = saves.save()
    assert names(saves.disk.folder) == [], "nothing of the checkpoint has come back"
    setattr(Checkpoint, moment, step)
    saves.goes_on()
    assert saves.save() is None
    assert len(names(saves.checkpoints)) == 1
    return error


@BLOCKING
@pytest.mark.parametrize("moment", ["_write", "_move"])
@pytest.mark.parametrize("layout", ["ZeRO 2", *(pytest.param(one, marks=LONG) for one in ("FSDP2 whole", "pipeline"))])
def test_a_disk_that_vanishes_leaves_no_half_checkpoint(
    tmp_path: Path, layout: str, moment: str, blocking: bool
) -> None:
    told = run_processes(loses_its_disk, 2, str(tmp_path), layout, blocking, moment, timeout=600)
    for error in told:
        assert error is not None
        assert f"[Errno {errno.ENOENT}]" in error
        assert "choose another folder" in error or "choose a folder that stays" in error
