"""The files of a model's checkpoint: finding them, their contents, and reading them tensor by tensor.

Files are mapped, so that a tensor takes memory only when it is copied or converted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate_cpp.checkpoint.containment import own_file, path_within
from accelerate_cpp.checkpoint.files import can_be_mapped, read_pickle
from accelerate_cpp.checkpoint.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate_cpp.checkpoint.safetensors_file import open_safetensors
from accelerate_cpp.config.text import parsed_json
from accelerate_cpp.errors import CheckpointError, InvalidArgument

__all__ = ["CheckpointFile", "checkpoint_files", "open_checkpoint"]

_INDEX_SUFFIX = ".index.json"


class CheckpointFile:
    """A file with tensors: in the safetensors format if its name says so, else as ``torch.save`` writes it.

    Attributes:
        path: the file.

    Raises:
        CheckpointError: the file is missing, damaged, cut short or of another format.
        InvalidArgument: it was written for another library than torch.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader: Any = None
        self._content: Mapping[str, Any] = {}
        if path.suffix == ".safetensors":
            self._reader = open_safetensors(path)
            library = (self._reader.metadata() or {}).get("format", "pt")
            if library != "pt":
                raise InvalidArgument(f"{path}: expected tensors of torch (format 'pt'), found format {library!r}")
            self._names = list(self._reader.keys())
        else:
            content = read_pickle(path, "a state dict", map_location="cpu", mmap=can_be_mapped(path))
            if not isinstance(content, Mapping):
                raise CheckpointError(f"{path}: expected a state dict, found a {type(content).__name__}")
            foreign = next((name for name in content if not isinstance(name, str)), None)
            if foreign is not None:
                raise CheckpointError(f"{path}: expected a state dict, with names; found the key {foreign!r}")
            self._content, self._names = content, list(content)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor; ``None`` for other values."""
        if self._reader is not None:
            return tuple(self._reader.get_slice(name).get_shape())
        value = self._content[name]
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def read(self, name: str) -> Any:
        """A tensor on the CPU, or the other value with that name.

        Raises:
            CheckpointError: it cannot be read.
        """
        if self._reader is None:
            return self._content[name]
        try:
            return self._reader.get_tensor(name)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CheckpointError(f"{self.path}: the tensor {name!r} cannot be read ({error})") from error


def open_checkpoint(checkpoint: str | os.PathLike[str]) -> list[CheckpointFile]:
    """All files of a checkpoint.

    Raises:
        InvalidArgument: there is no checkpoint, or several.
        CheckpointError: a file is missing, damaged or lacks a tensor that the index says it has.
    """
    paths, where = checkpoint_files(Path(checkpoint).expanduser())
    files = [CheckpointFile(path) for path in paths]
    held = {file.path: set(file) for file in files}
    lacking = sorted(name for name, path in where.items() if name not in held[path])
    if lacking:
        raise CheckpointError(
            f"{paths[0].parent}: the index says that {lacking[0]!r} is in {where[lacking[0]].name}, which lacks it "
            f"and {len(lacking) - 1} more; the files are of different checkpoints"
        )
    return files


def checkpoint_files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """The files of a checkpoint, and by name of a tensor the file that the index, if there is one, says it is in.

    Args:
        path: a file, an index ``*.index.json``, or a folder with ``model.safetensors``, ``pytorch_model.bin`` or one
            index; the first of these that is there.

    Raises:
        InvalidArgument: there is none, or there are several indices.
        CheckpointError: the index cannot be read, or names a file that is not there, or not in its folder.
    """
    if path.is_dir():
        path = _in_folder(path)
    elif not path.is_file():
        raise InvalidArgument(
            f"checkpoint={str(path)!r} does not exist; expected a file of weights, the index of several, or a folder "
            "with either"
        )
    return _of_index(path) if path.suffix == ".json" else ([path], {})


def _in_folder(folder: Path) -> Path:
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):  # links may lead anywhere: the program names folder and file
        if (folder / name).is_file():
            return folder / name
    indices = sorted(folder.glob(f"*{_INDEX_SUFFIX}"))
    if len(indices) == 1:
        return own_file(folder, indices[0].name)
    found = ", ".join(index.name for index in indices) or "none of them"
    raise InvalidArgument(
        f"checkpoint={str(folder)!r}: expected {SAFE_WEIGHTS_NAME}, {WEIGHTS_NAME} or one *{_INDEX_SUFFIX} in the "
        f"folder, found {found}"
    )


def _of_index(path: Path) -> tuple[list[Path], dict[str, Path]]:
    if not path.is_file():  # reading a named pipe would wait for whoever writes to it
        raise CheckpointError(
            f"{path}: expected the index of a checkpoint in several files, found a folder, a pipe, a device or a link "
            "to nothing: load another checkpoint"
        )
    try:
        content = parsed_json(path.read_text(encoding="utf-8"))
        named = content.get("weight_map", content)
        within = {file: path_within(path.parent, file, path) for file in set(named.values())}
        where = {name: within[file] for name, file in named.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: expected the index of a checkpoint in several files ({error})") from error
    paths = sorted(set(where.values()))
    missing = ", ".join(file.name for file in paths if not file.is_file())
    if missing:
        raise CheckpointError(f"{path} names files that are not there: {missing}; the checkpoint is not whole")
    return paths, where
