"""Weights in a folder: one file of raw bytes for each, and ``index.json`` with dtypes and shapes.

The folder is that of the original: ``<name>.dat`` has the elements in the order of a contiguous tensor, little-endian.
An entry of the index may also name a tensor in a safetensors file instead. Files are read by mapping them: what is not
used is not read, and nothing is copied.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate_cpp.checkpoint.containment import own_file, why_impossible
from accelerate_cpp.checkpoint.safetensors_file import open_safetensors
from accelerate_cpp.config.file import in_one_step
from accelerate_cpp.config.text import parsed_json, shortened
from accelerate_cpp.errors import CheckpointError, InvalidArgument, SystemFailure
from accelerate_cpp.placement.first_fit import prefixes
from accelerate_cpp.placement.module_tensors import as_dtype

__all__ = [
    "INDEX_NAME",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_state_dict",
    "offload_weight",
    "read_offload_index",
    "save_offload_index",
]

INDEX_NAME = "index.json"

Folder = str | os.PathLike[str]
Index = dict[str, dict[str, Any]]

# A mapped file takes no memory of its own, but systems allow a process some 65,000 mappings.
_MOST_MAPPINGS = 30_000


def offload_state_dict(save_dir: Folder, state_dict: Mapping[str, Tensor]) -> None:
    """Writes every tensor into ``save_dir``, which is created, and their index.

    What else is in the folder stays. If a tensor cannot be written, the files of this call are removed.

    Raises:
        InvalidArgument: a value is not a tensor with values.
        SystemFailure: the disk is full, or the system refused something else.
    """
    with FolderWriter(save_dir) as writer:
        for name, tensor in state_dict.items():
            writer.write(name, tensor)


def offload_weight(
    weight: Tensor, weight_name: str, offload_folder: Folder, index: Index | None = None
) -> Index | None:
    """Writes ``<weight_name>.dat`` into a folder that exists, and notes it in ``index``, which is returned.

    Raises:
        InvalidArgument: ``weight`` has no values, or its name can be no file's.
        SystemFailure: the disk is full, or the system refused something else.
    """
    path = _file_of(Path(offload_folder), weight_name)
    _write(path, _bytes_of(path, weight).numpy().data)
    if index is not None:
        index[weight_name] = _entry(weight)
    return index


def load_offloaded_weight(weight_file: Folder, weight_info: Mapping[str, Any]) -> Tensor:
    """The tensor in a ``.dat`` file, on the CPU. The file is mapped: changes of the tensor do not reach it.

    Args:
        weight_info: its entry in the index, with ``dtype`` and ``shape``.

    Raises:
        CheckpointError: the file is missing, or not as long as such a tensor is.
    """
    path, shape, dtype = Path(weight_file), tuple(weight_info["shape"]), as_dtype(weight_info["dtype"])
    assert dtype is not None
    try:
        empty = torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:  # its size does not fit into 64 bits
        raise CheckpointError(f"{path}: no tensor can have the shape {shortened(shape)}: offload again") from error
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; expected a tensor of {dtype}, {shape}: offload again")
    found = path.stat().st_size
    if found != empty.nbytes:
        raise CheckpointError(
            f"{path}: expected {empty.nbytes} bytes for {dtype}, {shape}, found {found}; the file is cut short or of "
            "another model: offload again, to another folder"
        )
    if not found:
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(path), shared=False, size=empty.numel(), dtype=dtype).reshape(shape)


def save_offload_index(index: Index, offload_folder: Folder) -> None:
    """Adds ``index`` to the index of a folder; an empty one changes nothing."""
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    whole = {**(read_offload_index(offload_folder) if path.is_file() else {}), **index}
    _write(path, json.dumps(whole, indent=2).encode())


def read_offload_index(offload_folder: Folder) -> Index:
    """What a folder has: dtype and shape of each tensor, or the safetensors file that it is in.

    Raises:
        CheckpointError: the folder has no index, one that cannot be read, or one that names files elsewhere.
    """
    path = own_file(Path(offload_folder), INDEX_NAME)
    if not path.is_file():  # reading a named pipe would wait for whoever writes to it
        raise CheckpointError(f"{path}: expected the index of offloaded weights, found none: offload again")
    try:
        index = parsed_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected the index of offloaded weights, found none ({error})") from error
    if not isinstance(index, dict):
        raise CheckpointError(f"{path}: expected the index of offloaded weights, found a {type(index).__name__}")
    for name, entry in index.items():
        _check_entry(path, name, entry)
    return index


def _check_entry(path: Path, name: str, entry: Any) -> None:
    """Raises ``CheckpointError`` unless the index ``path`` may say this of the tensor ``name``."""
    file = entry.get("safetensors_file") if isinstance(entry, dict) else None
    if isinstance(file, str):
        folder = Path(os.path.realpath(path.parent))
        if why_impossible(file) or not Path(os.path.realpath(file)).is_relative_to(folder):
            raise CheckpointError(
                f"{path} says that {name!r} is in {shortened(file)}: expected a file in {path.parent}. Nothing was "
                "read; pass an index of your own as offload_index, or offload again"
            )
        return
    shape = entry.get("shape") if isinstance(entry, dict) else None
    sizes = shape if isinstance(shape, list) else [None]
    is_known = isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and file is None
    if not is_known or not all(type(size) is int and size >= 0 for size in sizes):
        raise CheckpointError(
            f"{path}: {name!r}: expected the name of a dtype and a list of sizes as shape, found {shortened(entry)}: "
            "offload again"
        )


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: Sequence[str]) -> dict[str, Any]:
    """The entries of ``state_dict`` that ``submodule_names`` names, or modules that they are in; ``""`` is all."""
    wanted = set(submodule_names)
    return {
        name: value
        for name, value in state_dict.items()
        if "" in wanted or any(path in wanted for path in prefixes(name))
    }


class PrefixedDataset(Mapping[str, Any]):
    """The entries of ``dataset`` whose names begin with ``prefix``, under the rest of their names."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self.prefix) for name in self.dataset if name.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Tensors by name: those of a state dict, and those in a folder, which are mapped when they are first asked for.

    Args:
        state_dict: tensors in memory; they come before those of the folder.
        save_folder: with ``.dat`` files.
        index: what there is besides; by default the index of ``save_folder``.
        device: where tensors of safetensors files are put.

    Attributes:
        engines: by device, what fetches tensors before the modules need them (:mod:`.offload_ahead`), if anything does.

    Raises:
        InvalidArgument: nothing is given.
        CheckpointError: ``save_folder`` has no index that can be read.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: Folder | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise InvalidArgument("OffloadedWeightsLoader needs tensors: pass a state_dict, a save_folder or an index")
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        if index is None:
            index = {} if save_folder is None else read_offload_index(save_folder)
        self.index = index
        self.all_keys = [*self.state_dict, *(name for name in index if name not in self.state_dict)]
        self.device = device
        self.engines: dict[torch.device, Any] = {}
        self._mapped: dict[str, Tensor] = {}
        self._open: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        view = self._view(key)
        entry = self.index[key]
        if "safetensors_file" not in entry:
            return view
        return view.to(device=self.device, dtype=as_dtype(entry.get("dtype")))

    def view(self, key: str) -> Tensor | None:
        """The tensor as it is in a file, mapped; ``None`` if it is in memory, or too many files would be mapped.

        Raises:
            KeyError: there is no such tensor.
            CheckpointError: it cannot be read.
        """
        return None if key in self.state_dict or len(self.index) > _MOST_MAPPINGS else self._view(key)

    def _view(self, key: str) -> Tensor:
        mapped = self._mapped.get(key)
        if mapped is None:
            mapped = self._map(key, self.index[key])
            if len(self._mapped) < _MOST_MAPPINGS:
                self._mapped[key] = mapped
        return mapped

    def _map(self, key: str, entry: Mapping[str, Any]) -> Tensor:
        path = entry.get("safetensors_file")
        if path is None:
            if self.save_folder is None:
                raise InvalidArgument(f"{key!r} is in no safetensors file, and no save_folder is given")
            folder = Path(self.save_folder)
            return load_offloaded_weight(own_file(folder, _file_of(folder, key).name), entry)
        if path not in self._open:
            self._open[path] = open_safetensors(Path(path))
        name = entry.get("weight_name", key)
        try:
            tensor: Tensor = self._open[path].get_tensor(name)
        except Exception as error:
            raise CheckpointError(f"{path}: the tensor {name!r} cannot be read ({error})") from error
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is mapped, which a copy maps again."""
        return {**self.__dict__, "_mapped": {}, "_open": {}}


class FolderWriter:
    """Writes tensors into a folder, as a context: at its end the index is saved; after an error all is taken back.

    One process writes at a time, and others wait. A file that has the same bytes already stays, so that processes that
    offload the same weights to one folder map the same files, which the system has in memory once.

    Args:
        folder: is created if necessary.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._written: Index = {}
        self._kept: Index = {}

    @property
    def index(self) -> Index:
        """The tensors that this call has given to the folder."""
        return {**self._kept, **self._written}

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes ``<name>.dat``."""
        path = _file_of(self._folder, name)
        data = _bytes_of(path, tensor)
        if _has(path, data):
            self._kept[name] = _entry(tensor)
        else:
            _write(path, data.numpy().data)
            self._written[name] = _entry(tensor)

    def __enter__(self) -> FolderWriter:
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self._save_index()
            else:
                self._take_back()
        finally:
            os.close(self._lock)  # which lets others go on

    def _save_index(self) -> None:
        try:
            save_offload_index(self.index, self._folder)
        except BaseException:
            self._take_back()
            raise

    def _take_back(self) -> None:
        for name in self._written:
            _file_of(self._folder, name).unlink(missing_ok=True)
        path = self._folder / INDEX_NAME
        if path.is_file():
            kept = {
                name: entry for name, entry in read_offload_index(self._folder).items() if name not in self._written
            }
            _write(path, json.dumps(kept, indent=2).encode())


def _has(path: Path, data: Tensor) -> bool:
    """Whether a file has these bytes."""
    if not path.is_file() or path.stat().st_size != data.numel():
        return False
    return not data.numel() or torch.equal(torch.from_file(str(path), size=data.numel(), dtype=torch.uint8), data)


def _entry(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _file_of(folder: Path, name: str) -> Path:
    if not name or os.sep in name or "\0" in name or name in (".", ".."):
        raise InvalidArgument(
            f"{name!r} cannot be the name of an offloaded weight, because its file in {folder} would have that name"
        )
    return folder / f"{name}.dat"


def _bytes_of(path: Path, tensor: Tensor) -> Tensor:
    """The elements of a tensor that is to be written to ``path``, as bytes."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided or tensor.device.type == "meta":
        found = f"on {tensor.device}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise InvalidArgument(f"{path.stem!r}: expected a dense tensor with values to offload, found one {found}")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)


def _write(path: Path, data: bytes | memoryview) -> None:
    """Writes a file beside its place and moves it there, so that whoever has mapped an older one keeps that one."""
    try:
        with in_one_step(path) as waiting, waiting.open("xb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
    except OSError as error:
        raise SystemFailure(
            error.errno,
            f"{error.strerror} while writing {len(data)} bytes to {path}; make room or choose another folder",
        ) from error
