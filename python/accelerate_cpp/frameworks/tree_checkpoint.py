"""Named arrays in the safetensors format, in folders that are complete or not there: the checkpoints of frameworks."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from accelerate_cpp.checkpoint.files import FileRecord
from accelerate_cpp.checkpoint.finding import given
from accelerate_cpp.checkpoint.folder import followed
from accelerate_cpp.checkpoint.in_place import has_to_stay
from accelerate_cpp.checkpoint.layout import StateFile
from accelerate_cpp.checkpoint.manifest import MANIFEST_NAME, Manifest, check_files, read_manifest
from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.checkpoint.safetensors_file import read_safetensors, write_safetensors
from accelerate_cpp.checkpoint.writing import Checkpoint
from accelerate_cpp.errors import CheckpointError
from accelerate_cpp.frameworks.processes import processes
from accelerate_cpp.runtime import current

FILE_NAME = "state.safetensors"
_SHOWN = 5  # names in a message


@dataclass(frozen=True)
class Expected:
    """What a checkpoint must have under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _TreeFile(StateFile):
    """The arrays of a tree. Two names for the same memory are two arrays: whoever loads them ties nothing."""

    def write(self, folder: Path) -> FileRecord:
        return write_safetensors(folder / self.name, self.content)


def save(
    folder: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
) -> None:
    """Writes what rank 0 has as the checkpoint ``folder``. A collective: returns on all ranks when it is complete.

    A folder that exists is replaced in one step; if this fails or is killed at any moment, it is as it was. One that
    cannot be replaced, such as a mount point, gets the new files; the next load or save there finishes a save that was
    killed while it moved them.

    Args:
        tensors: by name, dense and on the CPU, or what returns them; that of other ranks is ignored.

    Raises:
        InvalidArgument: a dtype that the format lacks.
        SystemFailure: the disk is full, or the system refused something else.
        OtherRankFailed: on the ranks other than the one that failed.
    """
    ranks = _participants()
    files, targets = [], []

    def begin() -> tuple[str, bool]:
        targets.append(followed(Path(folder).expanduser()))
        if ranks.place == 0:
            files.append(_TreeFile(FILE_NAME, dict(tensors() if callable(tensors) else tensors), safe=True))
        return uuid.uuid4().hex, has_to_stay(targets[0])

    begun = ranks.together(f"saving {folder}", begin)
    token, in_place = begun[0][0], any(stays for _, stays in begun)
    manifest = Manifest(iteration=0, world_size=ranks.topology.world_size, files={}, cursors=[])
    Checkpoint(targets[0], token, files, manifest, in_place=in_place).write(ranks)


def load(folder: str | os.PathLike[str], expected: Mapping[str, Expected]) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint ``folder`` on the CPU, by name, once its checksums are right. A collective.

    They are mapped privately: changing them does not change the file.

    Args:
        expected: all names, with their shapes and dtypes.

    Raises:
        InvalidArgument: there is no such folder.
        CheckpointError: the checkpoint is damaged or of another tree; the message names what is missing or differs.
        OtherRankFailed: on the ranks other than the one that failed.
    """
    ranks = _participants()

    def read() -> dict[str, torch.Tensor]:
        path = given(folder)
        manifest = read_manifest(path)
        if manifest is None or FILE_NAME not in manifest.files:
            raise CheckpointError(
                f"{path}: expected a checkpoint of named arrays, with {MANIFEST_NAME} and {FILE_NAME}; it was written "
                "by something else"
            )
        check_files(path, manifest, *ranks.share)
        tensors = read_safetensors(path / FILE_NAME, "named arrays")
        _check_fits(path / FILE_NAME, tensors, expected)
        return tensors

    found: list[dict[str, torch.Tensor]] = []
    ranks.together(f"loading {folder}", lambda: found.append(read()))
    return found[0]


def _participants() -> Participants:
    processes()
    assert current.session is not None
    return Participants(current.session.topology)


def _check_fits(path: Path, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, Expected]) -> None:
    missing = [name for name in expected if name not in tensors]
    extra = [name for name in tensors if name not in expected]
    if missing or extra:
        raise CheckpointError(
            f"{path}: it is of another tree: missing {_some(missing)}, not expected {_some(extra)}; load it into a "
            "tree like the one that was saved"
        )
    for name, tensor in tensors.items():
        wanted = expected[name]
        if (tuple(tensor.shape), tensor.dtype) != (wanted.shape, wanted.dtype):
            raise CheckpointError(
                f"{path}: {name!r} has shape {tuple(tensor.shape)} and {tensor.dtype}, expected {wanted.shape} and "
                f"{wanted.dtype}; load it into a tree like the one that was saved"
            )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + rest
