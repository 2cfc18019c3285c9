"""Writing a checkpoint: all processes write to a temporary folder, which is then moved into place."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate_cpp.checkpoint.engine_states import EngineStates
from accelerate_cpp.checkpoint.files import FileRecord
from accelerate_cpp.checkpoint.folder import commit, prune, remove_leftovers, temporary_folder
from accelerate_cpp.checkpoint.layout import StateFile
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, Manifest
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.sharded_folder import ShardedFolder
from accelerate_cpp.checkpoint.snapshot import SnapshotMemory, snapshot

_log = logging.getLogger(__name__)


def remove_unfinished(target: Path) -> None:
    """Removes files that hooks wrote for a checkpoint that failed; one with a manifest is complete and is kept."""
    if not (target / MANIFEST_NAME).is_file():
        shutil.rmtree(target, ignore_errors=True)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint to be written.

    Attributes:
        target: its folder.
        token: part of the name of the temporary folder; the same on all ranks.
        files: those of this rank.
        manifest: without its files, which are known after they are written.
        limit: the number of numbered checkpoints to keep, including this one; ``None`` for all.
        existed: whether there was a folder ``target`` before hooks wrote into it; if not, a failure removes it.
        folders: of states in shards, what this rank writes there.
        engines: of another library, which writes them itself.
    """

    target: Path
    token: str
    files: Sequence[StateFile]
    manifest: Manifest
    limit: int | None = None
    existed: bool = False
    folders: Sequence[ShardedFolder] = ()
    engines: EngineStates | None = None

    def copied(self, memory: SnapshotMemory) -> Checkpoint:
        """The same, with copies in ``memory`` that training no longer changes."""
        parts: list[Any] = [*self.files, *self.folders]
        contents = snapshot([part.content for part in parts], memory)
        copies: list[Any] = [replace(part, content=content) for part, content in zip(parts, contents, strict=True)]
        return replace(self, files=copies[: len(self.files)], folders=copies[len(self.files) :])

    def write(self, ranks: Participants, threads: int = 1) -> None:
        """Writes the files of all ranks, and renames their folder in one step. A collective.

        An exception on any rank is raised on all, and ``target`` is then as it was.

        Args:
            threads: the number of threads that write files of this rank; with one, the caller writes, which also works
                while the interpreter exits and starts no threads.
        """
        temporary = temporary_folder(self.target, self.token)
        try:
            # Not together: where the library fails on one rank, it leaves the others in the midst of its collectives.
            of_engines = {} if self.engines is None else self.engines.write(temporary, ranks)
            records: dict[str, FileRecord] = {}
            places: list[list[Any]] = [[] for _ in self.folders]
            for files, own in ranks.together(
                f"writing {self.target}", lambda: self._write(temporary, ranks, threads, of_engines)
            ):
                records |= files
                for folder, there in zip(places, own, strict=True):
                    folder.extend(there)

            def complete() -> None:
                if ranks.place == 0:
                    for folder, there in zip(self.folders, places, strict=True):
                        records.update(folder.write_index(temporary, there))
                self._move(temporary, records, ranks.place == 0)

            ranks.together(f"moving {self.target} to its place", complete)
            if not ranks.alone and ranks.topology.world_size > ranks.topology.local_world_size:
                # Hosts with their own disks have their own folder; on a shared disk it has already been moved.
                here = ranks.topology.local_rank == 0 and temporary.is_dir()
                ranks.together(f"moving {self.target} to its place", lambda: self._move(temporary, records, here))
        except BaseException:
            if ranks.share[0] == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                if not self.existed:
                    remove_unfinished(self.target)
            raise
        _log.info("saved %s", self.target)

    def _write(
        self, temporary: Path, ranks: Participants, threads: int, of_engines: dict[str, FileRecord]
    ) -> tuple[dict[str, FileRecord], list[list[Any]]]:
        """Records of the files of this rank, and for each folder of shards the places of its parts."""
        if ranks.share[0] == 0:
            remove_leftovers(self.target, keep=temporary)
        temporary.mkdir(parents=True, exist_ok=True)
        parts: list[Any] = [*self.files, *self.folders]
        if threads == 1:
            written: list[Any] = [part.write(temporary) for part in parts]
        else:
            with ThreadPoolExecutor(threads) as writers:
                written = list(writers.map(lambda part: part.write(temporary), parts))
        records = of_engines | {file.name: record for file, record in zip(self.files, written, strict=False)}
        in_folders = written[len(self.files) :]
        for of_folder, _ in in_folders:
            records |= of_folder
        return records, [places for _, places in in_folders]

    def _move(self, temporary: Path, records: dict[str, FileRecord], here: bool) -> None:
        if not here:
            return
        files = {name: record for name, record in records.items() if (temporary / name).is_file()}
        replace(self.manifest, files=files).write(temporary)
        commit(temporary, self.target)
        if self.limit is not None:
            prune(self.target.parent, self.limit, newest=self.target)
