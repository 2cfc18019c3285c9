"""What engines of another library write of themselves into a checkpoint, in its own formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_cpp.checkpoint.archive import write_pickle
from accelerate_cpp.checkpoint.containment import own_file, path_within
from accelerate_cpp.checkpoint.files import FileRecord, read_pickle, record_of, sync_file
from accelerate_cpp.checkpoint.names import MODEL_NAME, is_mark
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.errors import CheckpointError
from accelerate_cpp.parallel.strategy import Strategy

__all__ = ["EngineStates"]


@dataclass(frozen=True)
class EngineStates:
    """The engines of a run.

    Attributes:
        strategy: writes and reads them.
        models: all that were prepared.
        options: of the library, for writing or for reading.
    """

    strategy: Strategy
    models: Sequence[Any]
    options: dict[str, Any]

    @property
    def tags(self) -> list[str]:
        """The folder of each model: named as the original's."""
        return [f"{MODEL_NAME}_{index}" if index else MODEL_NAME for index in range(len(self.models))]

    def write(self, folder: Path, ranks: Participants) -> Callable[[], dict[str, FileRecord]]:
        """Writes all into ``folder``. A collective, which no error of a file ends on one rank alone.

        Returns:
            Waits until the files are on the disk, and returns the records of those that this process has written as
            pickles, and of its share of what else there is on this host; raises the error.
        """
        own: dict[str, FileRecord] = {}

        def write(path: Path, content: Any) -> None:
            own[os.path.relpath(path, folder)] = write_pickle(path, content)

        failure = self.strategy.save_engines(self.models, folder, self.tags, write, **self.options)
        # Also waits for the others, as the library need not do.
        known = {name for names in ranks.gather(list(own)) for name in names}

        def records() -> dict[str, FileRecord]:
            if failure is not None:
                raise failure
            share, shares = ranks.share
            written = sorted(path for path in folder.rglob("*") if path.is_file() and not is_mark(path.name))
            others = [path for path in written if path.relative_to(folder).as_posix() not in known]
            for path in others[share::shares]:
                sync_file(path)
            return own | {path.relative_to(folder).as_posix(): record_of(path) for path in others[share::shares]}

        return records

    def read(self, folder: Path) -> None:
        """Loads all from ``folder``. A collective.

        Raises:
            CheckpointError: a file is missing, would run code, is no file, or does not fit.
        """
        for tag in self.tags:
            _require_files(folder, tag)

        def read(path: Path, where: Any, classes: Sequence[type]) -> Any:
            inside = path_within(folder, os.path.relpath(path, folder), folder)
            return read_pickle(inside, "the state of an engine of DeepSpeed", where, classes)

        self.strategy.load_engines(self.models, folder, self.tags, read, **self.options)


def _require_files(folder: Path, tag: str) -> None:
    """Raises ``CheckpointError`` unless all in ``folder / tag``, which DeepSpeed copies and opens by itself, are files
    and folders, and links to files in ``folder``.
    """
    for parent, folders, files in os.walk(own_file(folder, tag)):
        for name in (*folders, *files):
            path = own_file(folder, os.path.relpath(os.path.join(parent, name), folder))
            if not path.is_file() and (path.is_symlink() or not path.is_dir()):
                raise CheckpointError(
                    f"{path}: expected a file of an engine of DeepSpeed, found a link to a folder, a pipe or a device. "
                    "Nothing was read; remove it, or load another checkpoint"
                )
