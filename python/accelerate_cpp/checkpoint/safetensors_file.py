"""Files in the safetensors format, read through the library of that name, with errors that name the files."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_cpp.checkpoint.files import ChecksummedFile, FileRecord, require_file
from accelerate_cpp.errors import CheckpointError, InvalidArgument

_log = logging.getLogger(__name__)

_LENGTH_BYTES, _ALIGNMENT = 8, 8  # of the header


def _is_made_of_several(value: Any) -> bool:
    """Whether a tensor has no memory of its own, but consists of other tensors, like torchao's tensors and DTensors."""
    return bool(is_traceable_wrapper_subclass(value))


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same view of the same memory, and only for those."""
    has_memory = tensor.numel() > 0 and tensor.device.type != "meta" and tensor.layout is torch.strided
    if not has_memory or _is_made_of_several(tensor):
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def without_duplicates(tensors: Mapping[str, Any], warns: bool = False) -> dict[str, Any]:
    """``tensors`` without those that use the same memory as an earlier one (tied weights).

    Args:
        warns: warn of tensors that are left out, for files that may be loaded into models without tied weights.
    """
    found: set[tuple[Any, ...]] = set()
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor) if isinstance(tensor, torch.Tensor) else (name,)
        if place not in found:
            found.add(place)
            kept[name] = tensor
    removed = [name for name in tensors if name not in kept]
    if removed and warns:
        _log.warning(
            "Removed shared tensor %s while saving, because it uses the same memory as another one; the program that "
            "loads the file has to tie them again",
            removed,
        )
    return kept


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Writes ``tensors`` with metadata ``{"format": "pt"}``, and waits until they are on the disk.

    They are written from their own memory, one after the other; those of other devices are copied to the CPU one at a
    time.

    Raises:
        InvalidArgument: a value is not a dense tensor, is on the meta device, or has a dtype that the format lacks; no
            file has been touched then.
        SystemFailure: the disk is full, or the system refused something else.
    """
    for name, tensor in tensors.items():
        _require_writable(path, name, tensor)
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # aligned, as the library's
    header = _header_of(ordered)
    with ChecksummedFile(path) as file:
        file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for _, tensor in ordered:
            file.write(_bytes_of(tensor))
        return file.finish()


def _header_of(ordered: Sequence[tuple[str, torch.Tensor]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in ordered:
        dtype, per_element = _name_of(tensor.dtype)
        shape, end = list(tensor.shape), begin + tensor.numel() * tensor.element_size()
        if per_element > 1 and shape:
            shape[-1] *= per_element
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


@cache
def _name_of(dtype: torch.dtype) -> tuple[str, int]:
    """The library's name for ``dtype``, and how many of the format's elements are in one of torch's.

    Raises:
        KeyError: the library does not know it.
    """
    file = save({"": torch.zeros(1, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)})
    entry = json.loads(file[_LENGTH_BYTES:][: int.from_bytes(file[:_LENGTH_BYTES], "little")])[""]
    return entry["dtype"], entry["shape"][0]


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The elements of a tensor in the order of a contiguous one: a view, if it is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy()  # one element may have any stride


def _require_writable(path: Path, name: str, tensor: Any) -> None:
    plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    if not plain or _is_made_of_several(tensor):
        raise _unwritable(path, name, tensor)
    if tensor.device.type == "meta":
        raise InvalidArgument(f"{path}: {name!r} is on the meta device and has no values; materialise it before saving")
    try:
        _name_of(tensor.dtype)
    except KeyError as error:  # the library looks up dtypes
        raise _unwritable(path, name, tensor) from error


def _unwritable(path: Path, name: str, value: Any) -> InvalidArgument:
    found = f"a {type(value).__name__}"
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        found = f"a tensor of {value.dtype}, {value.layout}"
    return InvalidArgument(
        f"{path}: {name!r} is {found}, which the safetensors format cannot store; pass safe_serialization=False"
    )


def read_safetensors(path: Path, holds: str = "tensors") -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU. They are mapped privately: changing them does not change the file.

    Raises:
        CheckpointError: the file is missing, damaged, or not of this format.
    """
    require_file(path, holds)
    with open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)


def check_safetensors(path: Path) -> None:
    """Raises ``CheckpointError`` unless the header of a file is sound and fits its length; reads no tensor."""
    with open_safetensors(path):
        pass


def open_safetensors(path: Path) -> Any:
    """The library's reader of a file, whose header it has checked: tensors are read when they are requested.

    Raises:
        CheckpointError: the file is missing, no regular file, damaged, cut short, or not of this format.
    """
    if path.exists() and not path.is_file():  # opening a named pipe would wait for whoever writes to it
        raise CheckpointError(
            f"{path}: expected a file of tensors in the safetensors format, found a folder, a pipe or a device: load "
            "another checkpoint"
        )
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected tensors in the safetensors format, found something else ({error}); the file is damaged, "
            "cut short or in another format: load another checkpoint"
        ) from error
