"""Checkpoints in folders that cannot be replaced: where a file system is mounted, and where the program works.

The new one is written inside of the folder. When it is complete, it gets a name there in one step; then its files are
moved to where they belong. A process that is killed meanwhile leaves the rest to the next one that saves or loads.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from accelerate_cpp.checkpoint.files import sync_folder
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, files_as_written, read_manifest
from accelerate_cpp.errors import CheckpointError, SystemFailure

_COMPLETE = ".accelerate_cpp.complete"
_MOUNTS = Path("/proc/self/mountinfo")  # "36 35 98:0 /mnt1 /mnt2 …": the fifth is the place, with octal escapes


def has_to_stay(folder: Path) -> bool:
    """Whether a file system is mounted at ``folder``, or this process has it, or a folder in it, as its current one."""
    if not folder.is_dir():
        return False
    place = os.path.realpath(folder)
    if os.path.ismount(place) or place in _mount_points():
        return True
    try:
        current = Path.cwd()
    except FileNotFoundError:  # it was removed
        return False
    return Path(place) in (current, *current.parents)


def _mount_points() -> set[str]:
    """Where something is mounted, also a folder of the same file system; empty where the system does not tell."""
    try:
        mounts = [line.split(" ") for line in os.fsdecode(_MOUNTS.read_bytes()).split("\n")]
    except OSError:
        return set()
    return {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), one[4]) for one in mounts if len(one) > 4}


def settle(complete: Path, folder: Path) -> None:
    """Moves the files of ``complete``, which is in ``folder``, to where those of an earlier checkpoint are.

    Raises:
        SystemFailure: something of another kind is there; nothing was changed.
    """
    _require_no_obstacles(folder, _names_in(complete))
    shutil.rmtree(folder / _COMPLETE, ignore_errors=True)  # go_on would have moved it, were it one
    os.rename(complete, folder / _COMPLETE)
    sync_folder(folder)
    go_on(folder)


def go_on(folder: Path) -> None:
    """Ends what a killed process has begun in :func:`settle`. Several processes may call this at once.

    The folder may have come from elsewhere: nothing is moved or removed through links.

    Raises:
        CheckpointError: what was to be moved has a manifest that cannot be read.
        SystemFailure: as in :func:`settle`.
    """
    complete = folder / _COMPLETE
    if complete.is_symlink() or not complete.is_dir():
        return
    manifest = None
    try:
        manifest = read_manifest(complete)
    except FileNotFoundError:  # as below
        pass
    except CheckpointError as error:
        raise CheckpointError(
            f"{complete} is a checkpoint that a killed save was moving into {folder}, and cannot be read: remove it to "
            f"go on with what else is there; {error}"
        ) from error
    if manifest is not None:  # else another process has moved it, which is the last that is moved
        names = _names_in(complete)
        _require_no_obstacles(folder, names)
        kept = {str(folder / name) for name in (*names, *manifest.files, MANIFEST_NAME)}
        stale = [path for path in map(Path, files_as_written(folder) - kept) if _wrong_folder(folder, path) is None]
        for path in stale:
            path.unlink(missing_ok=True)
        _move(names - {MANIFEST_NAME}, complete, folder)
        for parent in {path.parent for path in stale} - {folder}:
            with suppress(OSError):  # it has other files
                parent.rmdir()
        _move({MANIFEST_NAME}, complete, folder)
    for emptied, _, _ in os.walk(complete, topdown=False):
        with suppress(OSError):  # by now, it may be of another save
            os.rmdir(emptied)
    sync_folder(folder)


def empty(folder: Path, last: str) -> None:
    """Removes what is in ``folder``, the file ``last`` at the end."""
    for path in [one for one in folder.iterdir() if one.name != last]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (folder / last).unlink(missing_ok=True)


def _require_no_obstacles(folder: Path, names: Collection[str]) -> None:
    for path in (folder / name for name in names):
        wrong = _wrong_folder(folder, path)
        if wrong is not None:
            raise SystemFailure(errno.ENOTDIR, f"{wrong} is no folder: remove it, or choose another folder")
        if path.is_dir() and not path.is_symlink():
            raise SystemFailure(errno.EISDIR, f"{path} is a folder: remove it, or choose another folder")


def _wrong_folder(folder: Path, path: Path) -> Path | None:
    """What is in the place of a folder between ``folder`` and ``path``: a file, or a link."""
    between = path.relative_to(folder).parents
    places = (folder / one for one in between[:-1])
    return next((one for one in places if os.path.lexists(one) and (one.is_symlink() or not one.is_dir())), None)


def _names_in(folder: Path) -> set[str]:
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return {os.path.relpath(path, folder) for path in paths}


def _move(names: Collection[str], source: Path, target: Path) -> None:
    for name in names:
        while os.path.lexists(source / name):  # else another process has moved it
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # another process has moved it, or removed the folder while it was empty
                os.replace(source / name, target / name)
    for parent in {(target / name).parent for name in names}:
        sync_folder(parent)
