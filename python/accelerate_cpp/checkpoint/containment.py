"""Checks that files named by a checkpoint are in its folder, whatever the origin of the checkpoint."""

from __future__ import annotations

import errno
import os
from pathlib import Path, PurePath
from typing import Any

from accelerate_cpp.config.text import shortened
from accelerate_cpp.errors import CheckpointError

# Caches of hubs keep the contents of models/…/snapshots/<revision>/<name> in models/…/blobs.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def path_within(folder: Path, name: str, source: Path) -> Path:
    """The path of the file ``name``, relative to ``folder``, to which the file ``source`` refers. It may be missing.

    Raises:
        CheckpointError: the name is absolute or points outside ``folder``, or it is a link that does, except to a blob
            of the hub's cache.
    """
    _require_possible(folder, name, f"{source} names")
    named = PurePath(name)
    if named.is_absolute() or ".." in named.parts:
        raise CheckpointError(
            f"{source} names {name!r}: expected the name of a file in {folder}, but it points outside that folder. "
            "Nothing was read; move the file into the folder and use its relative path, or load another checkpoint"
        )
    return _not_outside(folder, name, f", which {source.name} names,")


def why_impossible(path: Any) -> str:
    """Why no file can have this path; ``""`` if one can."""
    try:
        os.lstat(path)
    except TypeError:
        return "it is no text"
    except ValueError as error:  # a zero byte, or half a character
        return str(error)
    except OSError as error:
        return "too long" if error.errno == errno.ENAMETOOLONG else ""
    return ""


def _require_possible(folder: Path, name: Any, who: str) -> None:
    """Raises ``CheckpointError`` unless ``name``, which ``who`` says ("… names"), can be the name of a file."""
    reason = why_impossible(folder / name) if isinstance(name, (str, PurePath)) else "it is no text"
    if reason:
        raise CheckpointError(
            f"{who} {shortened(name)}: expected the name of a file, but no file can have that ({reason}): load another "
            "checkpoint"
        )


def own_file(folder: Path, name: str) -> Path:
    """The path of the file or folder of a checkpoint that has this ``name`` in it. It may be missing.

    Raises:
        CheckpointError: no file can have that name, or it is a link, or in a folder that is one, which points outside
            ``folder``, except to a blob of the hub's cache.
    """
    _require_possible(folder, name, f"{folder} should contain")
    return _not_outside(folder, name, "")


def _not_outside(folder: Path, name: str, known: str) -> Path:
    path = folder / name
    target = Path(os.path.realpath(path))
    if not (target.is_relative_to(os.path.realpath(folder)) or _is_blob(target)):
        raise CheckpointError(
            f"{path}{known} is a link to {target}, outside the folder. Nothing was read; if that file belongs to the "
            "checkpoint, copy it into the folder, or make a hard link"
        )
    return path


def _is_blob(target: Path) -> bool:
    """Whether a path without links is the content of a file in the hub's cache.

    Snapshots of the cache have links to these, and so have folders into which earlier versions of the hub's client
    were told to download (``local_dir``).
    """
    return target.parent.name == _BLOBS and (target.parent.parent / _SNAPSHOTS).is_dir()
