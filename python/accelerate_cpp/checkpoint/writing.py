"""Writing a checkpoint: all processes write to a temporary folder, which is then moved into place."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from accelerate_cpp.checkpoint.engine_states import EngineStates
from accelerate_cpp.checkpoint.files import FileRecord, failure_of
from accelerate_cpp.checkpoint.folder import (
    commit,
    is_unfinished,
    make_folder,
    prune,
    remove_leftovers,
    remove_unfinished,
    temporary_folder,
)
from accelerate_cpp.checkpoint.layout import StateFile
from accelerate_cpp.checkpoint.manifest import Manifest
from accelerate_cpp.checkpoint.names import OF_PLACE_0
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.sharded_folder import ShardedFolder
from accelerate_cpp.checkpoint.snapshot import SnapshotMemory, snapshot
from accelerate_cpp.comm.hosts import host_identity
from accelerate_cpp.devices.tree import leaves_of
from accelerate_cpp.errors import OtherRankFailed, PeerLost, SystemFailure, Timeout

T = TypeVar("T")
_Place = tuple[str, int, int]
_Written = tuple[_Place, dict[str, FileRecord], list[list[Any]]]
"""The place of the folder, records of the files of one rank, and for each folder of shards the places of its parts."""

_log = logging.getLogger(__name__)


def _place_of(folder: Path) -> _Place:
    """The same on all ranks that have this very folder, however they are numbered.

    Ranks of two hosts never have the same place, though they may share a disk.
    """
    found = folder.stat()
    return host_identity(), found.st_dev, found.st_ino


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

        An exception on any rank is raised on all, and ``target`` is then as it was. Where a rank is lost while the
        folder is being moved, ``target`` is as it was or complete; the temporary folder may be left on other hosts than
        that of the process in place 0, for the next save to remove.

        Args:
            threads: the number of threads that write files of this rank; with one, the caller writes, which also works
                while the interpreter exits and starts no threads.
        """
        temporary = temporary_folder(self.target, self.token)
        in_others_hands = False  # whether the process in place 0 may be moving the folder, without waiting for this one
        has_own_disk = False  # whether this is another folder than that of the process in place 0

        def write() -> _Written:
            nonlocal in_others_hands, has_own_disk
            written = self._write(temporary, ranks, threads, of_engines)
            in_others_hands = ranks.place != 0
            # Looked for before the folder is moved, after which clients of NFS may see it for a while longer.
            has_own_disk = not (temporary / OF_PLACE_0).exists()
            return written

        def together(doing: str, attempt: Callable[[], T]) -> list[T]:
            return ranks.together(doing, lambda: self._told(doing, attempt))

        try:
            # Before anybody writes, who might else find no room where leftovers are still being removed.
            together(f"making room for {self.target}", lambda: self._make_room(temporary, ranks))
            # Not together: where the library fails on one rank, it leaves the others in the midst of its collectives.
            written = None if self.engines is None else self.engines.write(temporary, ranks)
            of_engines = {} if written is None else together(f"writing {self.target}", written)[ranks.place]
            records: dict[str, FileRecord] = {}
            places: list[list[Any]] = [[] for _ in self.folders]
            written_here: dict[str, int] = {}
            everyones = together(f"writing {self.target}", write)
            here = everyones[ranks.place][0]
            for rank, (place, files, own) in enumerate(everyones):
                records |= files
                written_here |= dict.fromkeys(files, rank) if place == here else {}
                for folder, there in zip(places, own, strict=True):
                    folder.extend(there)

            def complete() -> None:
                if ranks.place == 0:
                    if ranks.are_of_several_hosts:
                        (temporary / OF_PLACE_0).unlink(missing_ok=True)
                    for folder, there in zip(self.folders, places, strict=True):
                        records.update(folder.write_index(temporary, there))
                self._move(temporary, records, written_here, ranks.place == 0)

            together(f"moving {self.target} to its place", complete)
            if ranks.are_of_several_hosts:
                moves = ranks.topology.local_rank == 0 and has_own_disk
                in_others_hands = not moves
                together(
                    f"moving {self.target} to its place", lambda: self._move(temporary, records, written_here, moves)
                )
        except BaseException as error:
            # If another rank has failed, all have ended their attempts; if one is lost, nobody knows about the others.
            if ranks.share[0] == 0 and (isinstance(error, OtherRankFailed) or not in_others_hands):
                shutil.rmtree(temporary, ignore_errors=True)
                if not self.existed or is_unfinished(self.target):
                    remove_unfinished(self.target)
            raise
        _log.info("saved %s", self.target)

    def _told(self, doing: str, attempt: Callable[[], T]) -> T:
        """What ``attempt`` returns; errors of the system say what this rank needs, and what room there is."""
        try:
            return attempt()
        except (PeerLost, Timeout):
            raise  # no errors of the disk, though of the system
        except OSError as error:
            raise failure_of(error, doing, self._needs()) from error

    def _needs(self) -> str:
        parts: list[Any] = [*self.files, *self.folders]
        leaves = [leaf for part in parts for leaf in leaves_of(part.content) if isinstance(leaf, torch.Tensor)]
        size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        besides = "" if self.engines is None else ", besides the states of engines"
        needs = f"this rank saves {size:,} bytes of tensors in {len(parts)} files or folders{besides}"
        try:
            disk = os.statvfs(next(one for one in self.target.parents if one.is_dir()))
        except (OSError, StopIteration):
            return needs
        return f"{needs}, and the disk has room for {disk.f_bavail * disk.f_frsize:,} bytes and {disk.f_favail:,} files"

    def _make_room(self, temporary: Path, ranks: Participants) -> None:
        """Once on each host: removes leftovers, and makes the folder in which all write."""
        if ranks.share[0] == 0:
            remove_leftovers(self.target, keep=temporary)
            make_folder(temporary)
        if ranks.place == 0 and ranks.are_of_several_hosts:
            make_folder(temporary)
            (temporary / OF_PLACE_0).touch()

    def _write(self, temporary: Path, ranks: Participants, threads: int, of_engines: dict[str, FileRecord]) -> _Written:
        """Writes what this rank has."""
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
        return _place_of(temporary), records, [places for _, places in in_folders]

    def _move(self, temporary: Path, records: dict[str, FileRecord], written_here: dict[str, int], moves: bool) -> None:
        """Moves the folder to its place, if this process ``moves`` it; files ``written_here``, by the rank that did so,
        have to be in it."""
        if not moves:
            return
        for name, rank in written_here.items():
            if not (temporary / name).is_file():
                raise SystemFailure(
                    errno.ENOENT,
                    f"{temporary / name} is gone, which rank {rank} has written: its folder was removed, or its file "
                    "system taken away, before the checkpoint was complete; choose a folder that stays",
                )
        files = {name: record for name, record in records.items() if (temporary / name).is_file()}
        replace(self.manifest, files=files).write(temporary)
        commit(temporary, self.target)
        if self.limit is not None:
            prune(self.target.parent, self.limit, newest=self.target)
