"""Files in the format of ``torch.save``, written in one pass over the memory of the tensors.

The format is a zip archive without compression. ``torch.save`` reads each tensor for the archive's checksum before it
hands it over to be written; here a piece is read once, and checksummed while it is in the processor's cache. Everything
but the identifier of the file is what ``torch.save`` writes, byte for byte, as long as no record is larger than 4 GB.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp._native import crc32
from accelerate_cpp.checkpoint.files import ChecksummedFile, FileRecord

_FOLDER = b"archive/"  # in the archive
_ALIGNMENT = 64  # bytes, of each record
_WIDE = 0xFFFFFFFF  # from which on a size or a place takes a field of 64 bits
_UTF8, _SIZES_FOLLOW = 0x0800, 0x0008  # flags of a record


def write_archive(file: ChecksummedFile, content: Any) -> None:
    """Writes ``content`` as ``torch.save(content, file)`` does; tensors of other devices are copied one at a time."""
    archive = _Archive(file)
    torch.serialization._save(content, archive, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    archive.finish()


def write_pickle(path: Path, content: Any) -> FileRecord:
    """A file that ``torch.load`` reads, down to the disk."""
    with ChecksummedFile(path) as file:
        write_archive(file, content)
        return file.finish()


class _Archive:
    """The part of torch's writer of archives that ``torch.save`` uses: a record is written when it is handed over."""

    def __init__(self, file: ChecksummedFile) -> None:
        self._file, self._begin = file, file.num_bytes
        self._directory: list[bytes] = []
        self._checksums = self._names = 0

    def write_record(self, name: str, data: str | bytes | torch.UntypedStorage, size: int) -> None:
        """Writes ``size`` bytes of ``data``; a storage is on the CPU."""
        path, place = _FOLDER + name.encode(), self._place
        flags = _UTF8 | (_SIZES_FOLLOW if size else 0)
        wide = _wide_fields(size, place)
        padding = -(place + 30 + len(path) + len(wide) + 4) % _ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        self._file.write(struct.pack("<4s5H3I2H", b"PK\3\4", 0, flags, 0, 0, 0, 0, 0, 0, len(path), len(extra)))
        self._file.write(path + extra)
        checksum = 0

        def add(piece: memoryview) -> None:
            nonlocal checksum
            checksum = crc32(piece, checksum)

        self._file.write(_buffer_of(data), add)
        if size:
            self._file.write(struct.pack("<4sI2Q" if wide else "<4sI2I", b"PK\7\10", checksum, size, size))
        self._checksums, self._names = self._checksums ^ checksum, crc32(path, self._names)
        short, where = min(size, _WIDE), min(place, _WIDE)
        lengths = (len(path), len(wide), 0)
        entry = struct.pack(
            "<4s6H3I5H2I", b"PK\1\2", 0, 0, flags, 0, 0, 0, checksum, short, short, *lengths, 0, 0, 0, where
        )
        self._directory.append(entry + path + wide)

    def finish(self) -> None:
        """Writes the records that follow those of ``torch.save``, and the directory."""
        self.write_record("version", "3\n", 2)
        identifier = f"{self._names:020d}{self._checksums:020d}"
        self.write_record(".data/serialization_id", identifier, len(identifier))
        directory, place, count = b"".join(self._directory), self._place, len(self._directory)
        end, size = place + len(directory), len(directory)
        short = (min(count, 0xFFFF), min(count, 0xFFFF), min(size, _WIDE), min(place, _WIDE))
        self._file.write(
            directory
            + struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, place)
            + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
            + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *short, 0)
        )

    @property
    def _place(self) -> int:
        return self._file.num_bytes - self._begin


def _wide_fields(size: int, place: int) -> bytes:
    """What the format adds to a record for numbers that do not fit into 32 bits; empty if they do."""
    numbers = [size, size] * (size >= _WIDE) + [place] * (place >= _WIDE)
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""


def _buffer_of(data: str | bytes | torch.UntypedStorage) -> Any:
    if isinstance(data, str):
        return data.encode()
    return data if isinstance(data, bytes) else torch.empty(0, dtype=torch.uint8).set_(data).numpy()
