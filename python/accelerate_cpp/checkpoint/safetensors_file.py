"""Files in the safetensors format, through the library of that name, with errors that name the files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_cpp.checkpoint.files import FileRecord, replacing, require_file, sealed
from accelerate_cpp.errors import CheckpointError, InvalidArgument, SystemFailure

_log = logging.getLogger(__name__)

_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)|code: (\d+)")


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

    Raises:
        InvalidArgument: a value is not a dense tensor, is on the meta device, or has a dtype that the format lacks.
        SystemFailure: the disk is full, or the system refused something else.
    """
    for name, tensor in tensors.items():
        _require_writable(path, name, tensor)
    whole = {name: tensor.detach().resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as waiting:
        try:
            waiting.touch()
            mode = waiting.stat().st_mode  # the library's file could only be read by the user
            save_file(_apart(whole), waiting, metadata={"format": "pt"})
        except KeyError as error:  # the library looks up dtypes
            name = next(name for name, tensor in whole.items() if tensor.dtype in error.args)
            raise _unwritable(path, name, whole[name]) from error
        except (SafetensorError, OSError) as error:
            raise _refusal(path, error) from error
        with suppress(OSError):  # some file systems do not support modes
            waiting.chmod(mode)
        return sealed(waiting)


def _refusal(path: Path, error: Exception) -> Exception:
    code = _SYSTEM_ERROR.search(str(error))
    number = getattr(error, "errno", None) or (int(code[1] or code[2]) if code else 0)
    if number:
        return SystemFailure(
            number, f"{os.strerror(number)} while writing {path}; make room or choose another folder ({error})"
        )
    return InvalidArgument(f"{path}: safetensors cannot write this ({error}); pass safe_serialization=False")


def _require_writable(path: Path, name: str, tensor: Any) -> None:
    plain = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
    if not plain or _is_made_of_several(tensor):
        raise _unwritable(path, name, tensor)
    if tensor.device.type == "meta":
        raise InvalidArgument(f"{path}: {name!r} is on the meta device and has no values; materialise it before saving")


def _unwritable(path: Path, name: str, value: Any) -> InvalidArgument:
    found = f"a {type(value).__name__}"
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        found = f"a tensor of {value.dtype}, {value.layout}"
    return InvalidArgument(
        f"{path}: {name!r} is {found}, which the safetensors format cannot store; pass safe_serialization=False"
    )


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous ``tensors``; those that share part of their memory with an earlier one are copied.

    The library refuses tensors that overlap.
    """
    ends: dict[torch.device, int] = {}
    apart = dict(tensors)
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        begin = tensor.data_ptr()
        if begin < ends.get(tensor.device, 0) and tensor.numel() > 0:
            apart[name] = tensor.clone()
        ends[tensor.device] = max(ends.get(tensor.device, 0), begin + tensor.numel() * tensor.element_size())
    return apart


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
        CheckpointError: the file is missing, damaged, cut short, or not of this format.
    """
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected tensors in the safetensors format, found something else ({error}); the file is damaged, "
            "cut short or in another format: load another checkpoint"
        ) from error
