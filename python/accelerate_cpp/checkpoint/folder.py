"""Checkpoint folders: written under a temporary name, moved into place in one step, numbered and pruned."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from accelerate_cpp.checkpoint.files import failure_of, sync_folder
from accelerate_cpp.checkpoint.in_place import empty, go_on, has_to_stay, settle
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, files_as_written

_log = logging.getLogger(__name__)

_NUMBERED = re.compile(r"checkpoint_(\d+)")
# In a folder that is made before the checkpoint is complete; it goes with the folder, whoever removes that.
_MARK = ".accelerate_cpp.unfinished"
_LARGE = 1 << 20  # bytes
_MOST_HELD = 16  # files
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)


def temporary_folder(target: Path, token: str, in_place: bool = False) -> Path:
    """The folder in which the checkpoint ``target`` is written until it is complete.

    Args:
        in_place: ``target`` is a folder that cannot be replaced; see :mod:`accelerate_cpp.checkpoint.in_place`.
    """
    return (target if in_place else target.parent) / f".{target.name}.tmp-{token}"


def followed(folder: Path) -> Path:
    """Where ``folder`` is: a link stays one, and its checkpoint goes to where it leads; and ``.`` gets its name."""
    return Path(os.path.realpath(folder)) if folder.is_symlink() or folder.name in ("", "..") else folder


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and those above it that are missing, in a way that survives a power failure."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(missing):
        sync_folder(one.parent)


def remove_leftovers(target: Path, keep: Path | None = None, of_all_numbers: bool = False) -> None:
    """Removes unfinished checkpoints that killed processes left next to ``target``.

    Args:
        keep: is being written, after hooks; their files are kept, too.
        of_all_numbers: the run numbers its checkpoints, and the leftovers of other numbers are its own, too.
    """
    put_back(target)
    name = r"checkpoint_\d+" if of_all_numbers else re.escape(target.name)
    visible, temporary = re.compile(name), re.compile(rf"\.{name}\.tmp-\w+")
    siblings = list(target.parent.iterdir()) if target.parent.is_dir() else []
    for path in [*siblings, *(target.iterdir() if target.is_dir() else ())]:
        if temporary.fullmatch(path.name) and path != keep:
            # Files that cannot be removed (open over NFS) only take up space; they must not stop training.
            shutil.rmtree(path, ignore_errors=True)
    for path in siblings if keep is None else ():
        if visible.fullmatch(path.name) and is_unfinished(path):
            remove_unfinished(path)


def begin(target: Path) -> None:
    """Makes the folder of a checkpoint before it is complete, for hooks; until then it does not count as one.

    A folder that is there already stays as it is. Several processes may call this at once.
    """
    if target.is_dir():
        return
    fresh = _unused(target)
    try:
        make_folder(target.parent)
        fresh.mkdir()
        (fresh / _MARK).touch()
        os.rename(fresh, target)  # in one step: there is no moment at which the folder has no mark
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if not target.is_dir():  # which another process has made
            raise failure_of(error, f"making {target}") from error


def is_unfinished(target: Path) -> bool:
    """Whether ``target`` has only what hooks wrote: the save has not ended yet, or was killed."""
    return (target / _MARK).exists() and not (target / MANIFEST_NAME).is_file()


def remove_unfinished(target: Path) -> None:
    """Removes files that hooks wrote for a checkpoint that failed; one with a manifest is complete and is kept."""
    if not target.is_dir() or (target / MANIFEST_NAME).is_file():
        return
    if has_to_stay(target):
        empty(target, last=_MARK)
        return
    doomed = _unused(target)
    with suppress(OSError):  # as is the case with temporary folders
        os.rename(target, doomed)  # in one step: what is left of it never has the name without the mark
    shutil.rmtree(doomed, ignore_errors=True)


def _unused(target: Path) -> Path:
    """The name of a temporary folder of ``target`` that nobody else uses."""
    return temporary_folder(target, uuid.uuid4().hex[:8])


def commit(temporary: Path, target: Path) -> None:
    """Replaces ``target`` with ``temporary``, in one step that survives a power failure.

    Where ``temporary`` is in ``target``, that stays and gets its files.

    If a folder ``target`` already exists, its files that no earlier checkpoint wrote, or that have changed since, are
    moved into the new one, but not the mark of an unfinished one.
    """
    if temporary.parent == target:
        _sync_tree(temporary)
        settle(temporary, target)
        (target / _MARK).unlink(missing_ok=True)
        return
    existed = target.is_dir()
    if existed:
        _carry_over(target, temporary)
    _sync_tree(temporary)
    if existed:
        _exchange(temporary, target)
        try:
            _carry_over(temporary, target, is_again=True)  # what has come meanwhile
        except OSError as error:
            _log.warning("%s: files that came while it was replaced are lost: %s", target, error)
    else:
        os.rename(temporary, target)
    sync_folder(target.parent)
    if existed:
        _remove(temporary)


def _carry_over(old: Path, new: Path, is_again: bool = False) -> None:
    replaced = files_as_written(old) | {str(old / _MARK)}

    def stay_behind(parent: str, names: list[str]) -> set[str]:
        there = new / os.path.relpath(parent, old)
        return {
            name
            for name in names
            if os.path.join(parent, name) in replaced
            or (os.path.lexists(there / name) and not _is_folder(Path(parent, name)))
        }

    def link(source: str, copy: str) -> None:
        if not stat.S_ISREG(os.lstat(source).st_mode):  # copytree itself makes links and folders
            if not is_again:
                _log.warning("%s is a pipe, a socket or a device: the new checkpoint does not get it", source)
            return
        try:
            os.link(source, copy, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, copy, follow_symlinks=False)

    shutil.copytree(old, new, ignore=stay_behind, symlinks=True, copy_function=link, dirs_exist_ok=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(parent, name)
            if stat.S_ISREG(os.lstat(path).st_mode):  # opening a pipe would wait for whoever writes to it
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        sync_folder(Path(parent))


def _exchange(first: Path, second: Path) -> None:
    """Swaps two folders, in one step if the system can (Linux, most file systems), else in three."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    paths = (os.fsencode(first), os.fsencode(second))
    if rename is not None and rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    aside = _set_aside(second)
    shutil.rmtree(aside, ignore_errors=True)  # what an earlier run has left: now there is a newer one
    os.rename(second, aside)
    os.rename(first, second)
    os.rename(aside, first)


def _set_aside(target: Path) -> Path:
    return target.parent / f".{target.name}.set-aside"


def put_back(target: Path) -> None:
    """Restores the old folder of ``target`` if a process was killed while replacing it with a new one.

    Somebody may have made an empty folder of that name since. Of a folder that cannot be replaced, what is left is
    moved into it.
    """
    go_on(target)
    aside = _set_aside(target)
    if not aside.is_dir():
        return
    with suppress(OSError):  # it is not there, or not empty
        target.rmdir()
    if not target.exists():
        with suppress(FileNotFoundError):  # another process has done it
            os.rename(aside, target)
    elif (target / MANIFEST_NAME).is_file():
        shutil.rmtree(aside, ignore_errors=True)


def numbered(folder: Path) -> dict[int, Path]:
    """The checkpoints in ``folder`` by their numbers, ascending; other entries, and unfinished ones, are ignored."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NUMBERED.fullmatch(path.name)
        if match and path.is_dir() and not is_unfinished(path):
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def prune(folder: Path, limit: int, newest: Path) -> None:
    """Removes checkpoints with the lowest numbers until ``limit`` are left, but never ``newest``.

    Each is renamed in one step, so that no checkpoint is ever incomplete. One that the system does not let go stays,
    with a warning: ``newest`` is complete, and training goes on.
    """
    try:
        paths = list(numbered(folder).values())
    except OSError as error:
        _log.warning("checkpoints that are too many could not be removed: %s; remove them", error)
        return
    for path in paths[: max(0, len(paths) - max(limit, 1))]:
        if path != newest:
            doomed = temporary_folder(path, "pruned")
            try:
                os.rename(path, doomed)
                _remove(doomed)
            except OSError as error:
                _log.warning("%s is one checkpoint too many and could not be removed: %s; remove it", path, error)


def _remove(folder: Path) -> None:
    """Removes ``folder`` and all names in it at once; a thread frees large files afterwards, which takes the disk a
    while.

    Files that cannot be removed (open in other processes over NFS) only take up space: they must not stop training.
    """
    held: set[int] = set()
    with suppress(OSError):
        for path in folder.iterdir():
            if len(held) < _MOST_HELD and path.is_file() and path.stat().st_size >= _LARGE:
                held.add(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    _held.update(held)
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # over NFS, files that are open keep a name
        _let_go(held)
        shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        threading.Thread(target=_let_go, args=(held,), name="checkpoint-pruner").start()
    except RuntimeError:  # no thread starts while the interpreter ends
        _let_go(held)


_held: set[int] = set()  # descriptors of the removed files


def _let_go(descriptors: Iterable[int]) -> None:
    for descriptor in list(descriptors):
        # First, as another file may have the number long before the close has freed the space of this one: a child that
        # is forked meanwhile must not close that.
        _held.discard(descriptor)
        os.close(descriptor)


# A child process would keep the disk space in use as long as it runs.
os.register_at_fork(after_in_child=lambda: _let_go(_held))
