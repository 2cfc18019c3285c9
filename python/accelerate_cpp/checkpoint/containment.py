"""Checks that files named by a checkpoint are in its folder, whatever the origin of the checkpoint."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from accelerate_cpp.errors import CheckpointError

# Caches of hubs keep the contents of models/…/snapshots/<revision>/<name> in models/…/blobs.
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def path_within(folder: Path, name: str, source: Path) -> Path:
    """The path of the file ``name``, relative to ``folder``, to which the file ``source`` refers. It may be missing.

    Raises:
        CheckpointError: the name is absolute or points outside ``folder``, or it is a link that does, except to the
            blobs of the hub's cache that contains ``folder``.
    """
    named = PurePath(name)
    if named.is_absolute() or ".." in named.parts:
        raise CheckpointError(
            f"{source} names {name!r}: expected the name of a file in {folder}, but it points outside that folder. "
            "Nothing was read; move the file into the folder and use its relative path, or load another checkpoint"
        )
    path = folder / name
    target = Path(os.path.realpath(path))
    if not any(target.is_relative_to(root) for root in _roots(Path(os.path.realpath(folder)))):
        raise CheckpointError(
            f"{path}, which {source.name} names, is a link to {target}, outside the folder. Nothing was read; if that "
            "file belongs to the checkpoint, copy it into the folder, or make a hard link"
        )
    return path


def _roots(folder: Path) -> list[Path]:
    """The places where files of ``folder``, a path without links, may be."""
    caches = [parent.parent / _BLOBS for parent in (folder, *folder.parents) if parent.name == _SNAPSHOTS]
    return [folder, *caches[:1]]
