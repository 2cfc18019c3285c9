"""The safetensors format: 8 bytes of header length, a header in JSON, and the bytes of all tensors without gaps.

https://huggingface.co/docs/safetensors. Read and written here, so that checksums are taken while the bytes pass.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from accelerate_cpp.checkpoint.files import ChecksummedFile, FileRecord, require_file
from accelerate_cpp.errors import CheckpointError, InvalidArgument

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for code, name in _NAMES.items() if hasattr(torch, name)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000  # as in the specification


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same view of the same memory, and only for those."""
    if tensor.numel() == 0 or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def without_duplicates(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """``tensors`` without those that are the same memory as an earlier one (tied weights)."""
    found: set[tuple[Any, ...]] = set()
    kept: dict[str, Any] = {}
    for name, tensor in tensors.items():
        place = place_of(tensor) if isinstance(tensor, torch.Tensor) else (name,)
        if place not in found:
            found.add(place)
            kept[name] = tensor
    return kept


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileRecord:
    """Writes ``tensors`` with metadata ``{"format": "pt"}``, down to the disk.

    Raises:
        InvalidArgument: a value is no dense tensor, is on the meta device, or has a dtype that the format lacks.
    """
    for name, tensor in tensors.items():
        _require_writable(path, name, tensor)
    # Wide elements first: every tensor then begins at a multiple of its element size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ChecksummedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            if tensors[name].numel():
                file.write(_bytes_of(tensors[name]))
        return file.finish()


def _require_writable(path: Path, name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.dtype not in _CODES:
        found = f"a {type(tensor).__name__}"
        if isinstance(tensor, torch.Tensor):
            found = f"a tensor of {tensor.dtype}, {tensor.layout}"
        raise InvalidArgument(
            f"{path}: {name!r} is {found}, which the safetensors format cannot hold; pass safe_serialization=False"
        )
    if tensor.device.type == "meta":
        raise InvalidArgument(f"{path}: {name!r} is on the meta device and has no values; materialise it before saving")


def _bytes_of(tensor: torch.Tensor) -> Any:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def read_safetensors(path: Path, holds: str = "tensors") -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU. They are mapped privately: changing them does not change the file.

    Raises:
        CheckpointError: the file is missing, damaged, or not of this format.
    """
    require_file(path, holds)
    size = path.stat().st_size
    with path.open("rb") as file:
        header, begin = _read_header(path, size, file)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    _check_layout(path, header, size - begin)
    return {name: _tensor_in(mapped, begin, row) for name, row in header.items()}


def check_safetensors(path: Path) -> None:
    """Raises ``CheckpointError`` unless the header of a file is sound and fits its length; reads no tensor."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header, begin = _read_header(path, size, file)
    _check_layout(path, header, size - begin)


def _damaged(path: Path, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected {expected}, found {found}; the file is damaged, cut short or not of the safetensors format: "
        "load another checkpoint"
    )


def _read_header(path: Path, size: int, file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header's row for each tensor, and where the data begins."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
        raise _damaged(path, f"a header within the {size} bytes of the file", f"one of {length} bytes")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise _damaged(path, "a header in JSON", str(error)) from error
    if not isinstance(header, dict):
        raise _damaged(path, "an object in JSON as header", type(header).__name__)
    header.pop("__metadata__", None)
    return header, 8 + length


def _check_layout(path: Path, header: dict[str, Any], data_bytes: int) -> None:
    """Raises ``CheckpointError`` unless the tensors fill ``data_bytes`` without gaps."""
    for name, row in header.items():
        if not _is_row(row):
            raise _damaged(path, f"dtype, shape and data_offsets for {name!r}", repr(row)[:200])
    end = 0
    for name, row in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = row["data_offsets"]
        wanted = math.prod(row["shape"]) * _DTYPES[row["dtype"]].itemsize
        if start != end or stop - start != wanted:
            raise _damaged(path, f"{name!r} in bytes {end} to {end + wanted}", f"{start} to {stop}")
        end = stop
    if end != data_bytes:
        raise _damaged(path, f"{end} bytes of tensors", f"{data_bytes}")


def _is_row(row: Any) -> bool:
    def naturals(values: Any) -> bool:
        return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)

    return (
        isinstance(row, dict)
        and row.get("dtype") in _DTYPES
        and naturals(row.get("shape"))
        and naturals(row.get("data_offsets"))
        and len(row["data_offsets"]) == 2
    )


def _tensor_in(mapped: mmap.mmap, begin: int, row: dict[str, Any]) -> torch.Tensor:
    dtype, count = _DTYPES[row["dtype"]], math.prod(row["shape"])
    if count == 0:
        return torch.empty(row["shape"], dtype=dtype)
    start, stop = (begin + offset for offset in row["data_offsets"])
    if start % dtype.itemsize:  # not ours: the specification asks for no alignment
        return torch.frombuffer(bytearray(mapped[start:stop]), dtype=dtype).reshape(row["shape"])
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start).reshape(row["shape"])
