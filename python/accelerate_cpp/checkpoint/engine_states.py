"""What engines of another library write of themselves into a checkpoint, in its own formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate_cpp.checkpoint.files import FileRecord, read_pickle, record_of, sync_file
from accelerate_cpp.checkpoint.names import MODEL_NAME
from accelerate_cpp.checkpoint.participants import Participants
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

    def write(self, folder: Path, ranks: Participants) -> dict[str, FileRecord]:
        """Writes all into ``folder``, and waits until they are on the disk. A collective.

        Returns:
            This process's share of the records of what has been written on this host.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.strategy.save_engines(self.models, folder, self.tags, **self.options)
        ranks.gather(None)  # the library need not wait for the others
        share, shares = ranks.share
        written = sorted(path for path in folder.rglob("*") if path.is_file())
        records = {}
        for path in written[share::shares]:
            sync_file(path)
            records[path.relative_to(folder).as_posix()] = record_of(path)
        ranks.gather(None)  # other files come into the folder now, which are no part of anybody's share
        return records

    def read(self, folder: Path) -> None:
        """Loads all from ``folder``. A collective.

        Raises:
            CheckpointError: a file is missing, would run code, or does not fit.
        """
        self.strategy.load_engines(self.models, folder, self.tags, _read, **self.options)


def _read(path: Path, where: Any, classes: Sequence[type]) -> Any:
    return read_pickle(path, "the state of an engine of DeepSpeed", where, classes)
