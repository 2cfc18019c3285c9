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
from accelerate_cpp.checkpoint.names import mark_name
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.sharded_folder import ShardedFolder
from accelerate_cpp.checkpoint.snapshot import SnapshotMemory, snapshot
from accelerate_cpp.devices.tree import leaves_of
from accelerate_cpp.errors import InvalidArgument, OtherRankFailed, PeerLost, SystemFailure, Timeout

T = TypeVar("T")
_Written = tuple[int, dict[str, FileRecord], list[list[Any]]]
"""The disk, records of the files of one rank, and for each folder of shards the places of its parts."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint to be written.

    Attributes:
        target: its folder.
        token: part of the name of the temporary folder; the same on all ranks.
        files: those of this rank.
        manifest: without its files, which are known after they are written.
        limit: the number of numbered checkpoints to keep, including this one; ``None`` for all.
        on_each_node: whether the project wants what all need on each host.
        in_place: ``target`` is a folder that cannot be replaced.
        folders: of states in shards, what this rank writes there.
        engines: of another library, which writes them itself.
    """

    target: Path
    token: str
    files: Sequence[StateFile]
    manifest: Manifest
    limit: int | None = None
    in_place: bool = False
    on_each_node: bool = False
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
        that of the process in place 0, for the next save to remove. If files are being moved into a folder that cannot
        be replaced, the next save or load ends that.

        Args:
            threads: the number of threads that write files of this rank; with one, the caller writes, which also works
                while the interpreter exits and starts no threads.
        """
        temporary = temporary_folder(self.target, self.token, self.in_place)
        leaders: list[int] = []
        in_others_hands = False  # whether another process may be moving the folder, without waiting for this one

        def write() -> _Written:
            nonlocal in_others_hands
            files, in_folders = self._write(temporary, threads, of_engines)
            in_others_hands = ranks.place != 0
            return _disk_of(temporary, leaders), files, in_folders

        def together(doing: str, attempt: Callable[[], T]) -> list[T]:
            return ranks.together(doing, lambda: self._told(doing, attempt))

        try:
            # Before anybody writes, who might else find no room where leftovers are still being removed.
            leading = together(f"making room for {self.target}", lambda: self._make_room(temporary, ranks))
            leaders += [place for place, leads in enumerate(leading) if leads]
            # Not together: where the library fails on one rank, it leaves the others in the midst of its collectives.
            written = None if self.engines is None else self.engines.write(temporary, ranks)
            of_engines = {} if written is None else together(f"writing {self.target}", written)[ranks.place]
            everyones = together(f"writing {self.target}", write)
            disk = everyones[ranks.place][0]
            moves = ranks.place == disk

            def complete() -> None:
                if ranks.place == 0:
                    self._require_loadable(everyones)
                    self._move(temporary, everyones, leaders, disk)

            together(f"moving {self.target} to its place", complete)
            if any(one[0] != 0 for one in everyones):  # hosts with their own disks have their own folder
                in_others_hands = not moves

                def move() -> None:
                    if moves and disk != 0:
                        self._move(temporary, everyones, leaders, disk)

                together(f"moving {self.target} to its place", move)
            if (limit := self.limit) is not None:  # not before all hosts have the new one
                parent = self.target.parent
                together("removing older checkpoints", lambda: prune(parent, limit, self.target) if moves else None)
        except BaseException as error:
            # If another rank has failed, all have ended their attempts; if one is lost, nobody knows about the others.
            if ranks.lead_a_host and (isinstance(error, OtherRankFailed) or not in_others_hands):
                shutil.rmtree(temporary, ignore_errors=True)
                if is_unfinished(self.target):
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
            disk = os.statvfs(next(one for one in (self.target, *self.target.parents) if one.is_dir()))
        except (OSError, StopIteration):
            return needs
        return f"{needs}, and the disk has room for {disk.f_bavail * disk.f_frsize:,} bytes and {disk.f_favail:,} files"

    def _make_room(self, temporary: Path, ranks: Participants) -> bool:
        """Once on each host: removes leftovers, and makes the folder in which all write; whether this was done here."""
        leads = ranks.lead_a_host or ranks.place == 0
        if ranks.lead_a_host:
            remove_leftovers(self.target, keep=temporary)
        if leads:
            make_folder(temporary)
            (temporary / mark_name(ranks.place)).touch()
        return leads

    def _write(
        self, temporary: Path, threads: int, of_engines: dict[str, FileRecord]
    ) -> tuple[dict[str, FileRecord], list[list[Any]]]:
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
        return records, [places for _, places in in_folders]

    def _require_loadable(self, everyones: Sequence[_Written]) -> None:
        """Refuses what nobody could load, while the checkpoints before are still there.

        Raises:
            InvalidArgument: shards are on several disks, or several hosts have written different files under one name.
        """
        writers: dict[tuple[int, str], tuple[int, FileRecord]] = {}
        shards = tuple(f"{folder.name}/" for folder in self.folders)
        for rank, (disk, files, _) in enumerate(everyones):
            for name, record in files.items():
                first, other = writers.setdefault((disk, name), (rank, record))
                if other != record:
                    raise InvalidArgument(
                        f"{self.target / name}: rank {first} and rank {rank} have written different files under this "
                        "name; ProjectConfiguration(save_on_each_node=True) is for machines with disks of their own: "
                        "leave it out where they share the folder"
                    )
                if disk != 0 and not self.on_each_node and name.startswith(shards):
                    raise InvalidArgument(
                        f"{self.target}: rank {rank} has written its part of the state to another disk than rank 0, so "
                        "that no process could load it; expected a folder that all machines share, or, to bring the "
                        "parts together by hand, ProjectConfiguration(save_on_each_node=True)"
                    )
        apart = [rank for rank, (disk, _, _) in enumerate(everyones) if disk != 0]
        if apart and not self.on_each_node:
            _log.warning(
                "%s: rank %d writes to another disk than rank 0, where the model is: to load it on all machines, "
                "choose a folder that they share, or pass ProjectConfiguration(save_on_each_node=True)",
                self.target,
                apart[0],
            )

    def _write_indices(self, temporary: Path, everyones: Sequence[_Written]) -> dict[str, FileRecord]:
        """Writes where in the folders of shards the parts of all ranks are."""
        records: dict[str, FileRecord] = {}
        for number, folder in enumerate(self.folders):
            records |= folder.write_index(temporary, [part for _, _, own in everyones for part in own[number]])
        return records

    def _move(self, temporary: Path, everyones: Sequence[_Written], leaders: Sequence[int], disk: int) -> None:
        """Moves the folder of ``disk`` to its place; all files that were written there have to be in it.

        Its manifest names them, and no file of another disk, which may have other contents.
        """
        for place in leaders:
            (temporary / mark_name(place)).unlink(missing_ok=True)
        files = self._write_indices(temporary, everyones) if disk == 0 else {}
        for rank, (there, written, _) in enumerate(everyones):
            for name, record in written.items() if there == disk else ():
                files[name] = record
                if not (temporary / name).is_file():
                    raise SystemFailure(
                        errno.ENOENT,
                        f"{temporary / name} is gone, which rank {rank} has written: its folder was removed, or its "
                        "file system taken away, before the checkpoint was complete; choose a folder that stays",
                    )
        replace(self.manifest, files=files, token=self.token).write(temporary)
        commit(temporary, self.target)


def _disk_of(temporary: Path, leaders: Sequence[int]) -> int:
    """The first of ``leaders`` whose mark is in ``temporary``: processes with the same one have the same folder.

    Marks are there since before anybody wrote, and nobody has looked for them before: clients of NFS know for a while
    longer what they have seen, so whether a folder was moved is no question for them.

    Raises:
        SystemFailure: none is there.
    """
    for place in leaders:
        if (temporary / mark_name(place)).exists():
            return place
    raise SystemFailure(
        errno.ENOENT,
        f"{temporary} is gone, which was made for this checkpoint: it was removed, or its file system taken away; "
        "choose a folder that stays",
    )
