"""The manifest of a checkpoint: an additional file that lists the checkpoint's files and the position of each loader.

It is written last. It names the length and checksum of every file that was written on this host, and has its own
checksum, so that a folder can be checked without loading anything.
"""

from __future__ import annotations

import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from accelerate_cpp.checkpoint.containment import own_file, path_within
from accelerate_cpp.checkpoint.files import FileRecord, record_of, write_bytes
from accelerate_cpp.checkpoint.names import RNG_STATE_NAME, random_states_name
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.safetensors_file import check_safetensors
from accelerate_cpp.config.text import parsed_json, shortened
from accelerate_cpp.errors import CheckpointError

MANIFEST_NAME = "accelerate_cpp.json"
_FORMAT = 1
_OF_CHECKPOINTS = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict|random_states|custom_checkpoint)([_-].*)?"
    r"\.(safetensors|bin|pkl)"
)
_THREADS = 4  # reading and checksums both release the interpreter lock


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint folder.

    Attributes:
        iteration: the number of the next checkpoint of the run.
        world_size: the number of processes that wrote it.
        files: by name; without files that hooks or other programs wrote.
        cursors: the position of every prepared loader, in the order of ``prepare``, as plain values.
        token: of the save, so the same on all hosts that have a part of it; empty in older checkpoints.
    """

    iteration: int
    world_size: int
    files: dict[str, FileRecord]
    cursors: list[dict[str, int | str]]
    token: str = ""

    @property
    def origin(self) -> str:
        """What is the same in all parts of a checkpoint; of those that processes have saved alone, where loaders were.

        Empty if nothing is known.
        """
        if self.world_size > 1:
            return self.token
        return ", ".join(f"{cursor.get('epoch')}:{cursor.get('position')}" for cursor in self.cursors)

    def write(self, folder: Path) -> None:
        """Writes it into ``folder``, and waits until it is on the disk."""
        body = {
            "format": _FORMAT,
            "iteration": self.iteration,
            "world_size": self.world_size,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
            "cursors": self.cursors,
            "token": self.token,
        }
        text = json.dumps({**body, "xxh3": _checksum(body)}, indent=1) + "\n"
        write_bytes(folder / MANIFEST_NAME, text.encode())


def _checksum(body: dict[str, Any]) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(body, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of ``folder``; ``None`` if there is none, as in checkpoints of the original.

    Raises:
        CheckpointError: it is damaged, from a later version of this package, or names files outside of ``folder``.
    """
    path = own_file(folder, MANIFEST_NAME)
    if not path.is_file():
        return None
    try:
        body = parsed_json(path.read_bytes())
        if not isinstance(body, dict):
            raise ValueError(f"a {type(body).__name__} instead of an object")
        checksum, version = body.pop("xxh3"), body["format"]
        if version == _FORMAT and checksum == _checksum(body):
            for name in body["files"]:
                path_within(folder, name, path)
                if PurePosixPath(name).as_posix() != name:  # one file under many names would be read for each
                    raise ValueError(f"{shortened(name)}, which is no name as it is written")
            files = {name: FileRecord(**record) for name, record in body["files"].items()}
            numbers = body["iteration"], body["world_size"]
            return _of_right_types(Manifest(*numbers, files, body["cursors"], body.get("token", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected the manifest of a checkpoint, found {error}; {_ADVICE}") from error
    if version != _FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, but this version of accelerate_cpp only knows {_FORMAT}; update "
            "accelerate_cpp"
        )
    raise CheckpointError(f"{path}: its checksum does not match its content; {_ADVICE}")


def _of_right_types(manifest: Manifest) -> Manifest:
    """``manifest``; ``TypeError`` if a value in it has a type that none was written with."""
    numbers = [manifest.iteration, manifest.world_size]
    numbers += [number for record in manifest.files.values() for number in (record.bytes, record.xxh3)]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("something else than a number where iteration, world_size, bytes and xxh3 should be")
    if not isinstance(manifest.cursors, list) or not all(isinstance(cursor, dict) for cursor in manifest.cursors):
        raise TypeError("something else than positions of loaders in cursors")
    if not isinstance(manifest.token, str):
        raise TypeError("something else than a text in token")
    return manifest


_ADVICE = f"load another checkpoint, or remove {MANIFEST_NAME} to load the files unchecked"


def check_files(folder: Path, manifest: Manifest, share: int = 0, shares: int = 1) -> None:
    """Reads the files of ``manifest`` and compares lengths and checksums.

    Args:
        share: check only the files of this part, of ``shares`` parts that the processes of a host divide among them.

    Raises:
        CheckpointError: a file is missing or differs.
    """
    largest_first = sorted(manifest.files, key=lambda name: (-manifest.files[name].bytes, name))[share::shares]
    for name in largest_first:
        record = manifest.files[name]
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, which {MANIFEST_NAME} names; {_ADVICE}")
        if path.stat().st_size != record.bytes:
            raise CheckpointError(f"{path}: expected {record.bytes} bytes, found {path.stat().st_size}; {_ADVICE}")
    with ThreadPoolExecutor(min(_THREADS, len(largest_first) or 1)) as readers:
        records = readers.map(lambda name: record_of(folder / name), largest_first)
        for name, found in zip(largest_first, records, strict=True):
            if found != (expected := manifest.files[name]):
                raise CheckpointError(
                    f"{folder / name}: expected checksum {expected.xxh3:016x}, found {found.xxh3:016x}; {_ADVICE}"
                )


def is_checkpoint(folder: Path) -> bool:
    """Whether ``folder`` looks like a checkpoint, of this package or of the original."""
    return (folder / MANIFEST_NAME).is_file() or any(folder.glob(f"{RNG_STATE_NAME}_*.pkl"))


def files_as_written(folder: Path) -> set[str]:
    """The files that the manifest of ``folder`` names and that are not newer than it, and the manifest."""
    own = folder / MANIFEST_NAME
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return {str(own)}
    if manifest is None:
        return set()
    written = {}
    for path in (own, *(folder / name for name in manifest.files)):
        with suppress(FileNotFoundError):  # it is gone, or another process is removing it
            written[path] = path.stat().st_mtime_ns
    return {str(path) for path, time in written.items() if own in written and time <= written[own]}


def check_structure(folder: Path, rank: int) -> None:
    """Checks a folder without manifest, as the original writes them: required files must exist with an intact
    structure.

    Raises:
        CheckpointError: the random states of ``rank``, which are written last, are missing on all ranks; or a file is
            cut short.
    """
    if not any((folder / random_states_name(number)).is_file() for number in (rank, 0)):
        raise CheckpointError(f"{folder} has neither {MANIFEST_NAME} nor {random_states_name(rank)}: it is incomplete")
    for path in sorted(folder.iterdir()):
        if not _OF_CHECKPOINTS.fullmatch(path.name):
            continue  # a file of the user, which may have any content
        if path.suffix == ".safetensors":
            check_safetensors(own_file(folder, path.name))
        elif path.suffix in {".bin", ".pkl"} and path.is_file() and not zipfile.is_zipfile(own_file(folder, path.name)):
            raise CheckpointError(f"{path} is cut short")


def why_not_whole(folder: Path, ranks: Participants, by_outline: bool = True) -> str | None:
    """The reason why ``folder`` is not a complete checkpoint; ``None`` if this rank's share of it is complete.

    Args:
        by_outline: check the structure of a folder without manifest; otherwise it passes.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is not None:
            check_files(folder, manifest, *ranks.share)
        elif by_outline:
            check_structure(folder, ranks.topology.rank)
    except (CheckpointError, OSError) as error:
        return str(error)
    return None
