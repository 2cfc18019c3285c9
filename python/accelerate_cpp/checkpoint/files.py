"""Files that are checksummed while they are written, and read with errors that name them."""

from __future__ import annotations

import _codecs
import ctypes
import errno
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from accelerate_cpp.checkpoint.pickle_weight import check_saved_file
from accelerate_cpp.config.file import in_one_step
from accelerate_cpp.errors import CheckpointError, InvalidArgument, SystemFailure

_PIECE = 1 << 20  # bytes; checksummed and written while they are in the processor's cache
_READ_PIECE = 1 << 19  # read and checksummed there
_BEHIND = 32 << 20  # bytes that are written before the disk is asked to start writing them
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
# In messages of torch.load about its arguments, not about the file.
_OF_THE_CALLER = ("deserialize object on", "unexpected keyword argument", "map_location", "CUDA error")
# The message of torch.load for a pickle that names a function which may not be called.
_REFUSED = re.compile(
    r"(?:unsupported global: |unsupported )GLOBAL (?P<name>\S+)"
    r"|(?:reduce for unrecognized function |allowlisted via `add_safe_globals`,? but got )(?P<object>.+)",
    re.IGNORECASE,
)
_np_core: Any = getattr(np, "_core", None) or np.core  # type: ignore[attr-defined,unused-ignore]
# Needed by the states of NumPy's generators, in addition to the names that torch always allows in a pickle.
SAFE_GLOBALS: list[Any] = [_np_core.multiarray._reconstruct, np.ndarray, np.dtype, _codecs.encode]
if hasattr(np, "dtypes"):
    SAFE_GLOBALS.append(np.dtypes.UInt32DType)


@dataclass(frozen=True)
class FileRecord:
    """The expected content of a file: its length in bytes, and their 64-bit XXH3 (https://xxhash.com)."""

    bytes: int
    xxh3: int


def failure_of(error: OSError, doing: str, known: str = "") -> SystemFailure:
    """``error`` with what was being done, what else is known of it, and what to do; as it is if it says that already.

    Args:
        doing: as ``"writing /some/file"``.
        known: a clause, such as how much room there is.
    """
    if isinstance(error, SystemFailure):
        return SystemFailure(error.errno, f"{error.strerror}; {known}") if known else error
    where = f" ({os.fspath(error.filename)})" if isinstance(error.filename, (str, os.PathLike)) else ""
    reason = os.strerror(error.errno) if error.errno else str(error)
    clauses = [f"{reason} while {doing}{where}", _ADVICE.get(error.errno or 0, _LOOK), *filter(None, [known])]
    return SystemFailure(error.errno or errno.EIO, "; ".join(clauses))


_LOOK = "look after the disk, or choose another folder"
_ROOM = "make room or choose another folder"
_RIGHTS = "make the folder one that this user may write, or choose another"
_LINK = "remove the link, or choose another folder"
_GONE = "see whether the file system is still mounted and nobody removes its folders, or choose another folder"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _ROOM),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), _RIGHTS),
    errno.ELOOP: _LINK,
    **dict.fromkeys((errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ENODEV), _GONE),
}


class ChecksummedFile:
    """A file that is written from beginning to end. A link at its place is not followed.

    :meth:`finish` has to be called for the data to survive a power failure. Errors of the system raise
    ``SystemFailure`` with the path.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._bytes, self._digest = path, 0, xxhash.xxh3_64()
        self._begun = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = self._ask(os.open, path, flags, 0o666)

    def write(self, data: Any, observe: Callable[[memoryview], object] | None = None) -> int:
        """Appends all of ``data``, anything with a buffer, and returns its length in bytes.

        Args:
            observe: called with each piece, which is then in the processor's cache.
        """
        view = memoryview(data).cast("B")
        rest = view
        while rest:
            # Up to a multiple of its size in the file, which lets the system use large pages for it.
            length = _PIECE - self._bytes % _PIECE
            piece, rest = rest[:length], rest[length:]
            if observe is not None:
                observe(piece)
            self._digest.update(piece)
            while piece:
                written = self._ask(os.write, self._descriptor, piece)
                self._bytes += written
                piece = piece[written:]
            if self._bytes - self._begun >= _BEHIND:
                _begin_writeback(self._descriptor, self._begun, self._bytes - self._begun)
                self._begun = self._bytes
        return len(view)

    @property
    def num_bytes(self) -> int:
        """What has been written."""
        return self._bytes

    def finish(self) -> FileRecord:
        """Waits until the data is on the disk."""
        self._ask(_synced, self._descriptor)
        return FileRecord(self._bytes, self._digest.intdigest())

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self._descriptor)

    def _ask(self, call: Callable[..., int], *arguments: Any) -> int:
        try:
            return call(*arguments)
        except OSError as error:
            raise failure_of(error, f"writing {self._path}, after {self._bytes} bytes") from error


def _begin_writeback(descriptor: int, begin: int, size: int) -> None:
    """Makes the disk write while the file is still being created. Without effect if the system does not support it."""
    if _sync_file_range is not None:  # errors are reported by fsync
        _sync_file_range(descriptor, ctypes.c_int64(begin), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


def _synced(descriptor: int) -> int:
    os.fsync(descriptor)
    return 0


def write_bytes(path: Path, data: bytes) -> FileRecord:
    """Writes a whole file, down to the disk."""
    with ChecksummedFile(path) as file:
        file.write(data)
        return file.finish()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name next to ``path`` to write to; the file then replaces ``path`` in a step that survives a power
    failure.
    """
    with in_one_step(path) as waiting:
        yield waiting
    sync_folder(path.parent)


def record_of(path: Path) -> FileRecord:
    """Reads a whole file for its length and checksum."""
    size, digest, piece = 0, xxhash.xxh3_64(), bytearray(_READ_PIECE)
    view = memoryview(piece)
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # some file systems take no advice
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)  # read further ahead
        while count := file.readinto(piece):
            size += count
            digest.update(view[:count])
    return FileRecord(size, digest.intdigest())


def sync_file(path: Path) -> None:
    """Waits until the content of ``path`` is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Waits until the names in ``folder`` are on the disk."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_file(path: Path, holds: str) -> None:
    """Raises ``CheckpointError`` unless there is a file ``path``, which ``holds`` describes."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; it should contain {holds}. The checkpoint is incomplete, or was saved by a program "
            "that prepared other objects: load another one, or prepare the objects that it was saved with"
        )


def can_be_mapped(path: Path) -> bool:
    """Whether ``torch.load`` can map the file: torch's old format is no archive."""
    return path.is_file() and zipfile.is_zipfile(path)  # opening a pipe would wait for whoever writes to it


def read_pickle(path: Path, holds: str, map_location: Any = None, also: Sequence[type] = (), **load_kwargs: Any) -> Any:
    """``torch.load`` with ``weights_only=True`` unless ``load_kwargs`` say otherwise.

    Before it is read, what the pickle stands for is weighed (:mod:`.pickle_weight`), unless it is trusted.

    Args:
        holds: what should be in the file, for errors.
        also: classes that may be in it besides tensors and plain values; none of them runs code.

    Raises:
        CheckpointError: the file is missing, damaged, would run code, or stands for more values than its bytes do.
    """
    require_file(path, holds)
    options = {"weights_only": True, **load_kwargs}
    is_weighed = options["weights_only"] in (None, True)
    try:
        if is_weighed:
            check_saved_file(path)
        # Indices of sparse tensors that lead out of them would be followed.
        checked = torch.sparse.check_sparse_tensor_invariants(True)
        with torch.serialization.safe_globals([*SAFE_GLOBALS, *also]), checked:
            return torch.load(path, map_location=map_location, **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        refused = _REFUSED.search(str(error))
        if refused is not None:
            called = refused["name"] or refused["object"]
            raise CheckpointError(
                f"{path}: expected {holds}, made of tensors and plain values; loading it would call functions that the "
                f"file names: {called}. Nothing was called. Load another checkpoint; only if you trust whoever wrote "
                "this one, torch.load(..., weights_only=False) reads the file, and for optimizers, schedulers and "
                "loaders load_state(..., load_kwargs={'weights_only': False})"
            ) from error
        if any(text in str(error) for text in _OF_THE_CALLER):
            raise InvalidArgument(
                f"{path}: {holds} cannot be read with these arguments ({_reason(error)}); check map_location and "
                "load_kwargs"
            ) from error
        trusted = ""
        if is_weighed and isinstance(error, pickle.UnpicklingError):
            trusted = (
                "; if torch.save has not written it as it is, and only if you trust whoever has, "
                "torch.load(..., weights_only=False) may read it, and save it again"
            )
        raise CheckpointError(
            f"{path}: expected {holds}, written by torch.save; it cannot be read ({_reason(error)}). The file is "
            f"damaged or cut short: load another checkpoint{trusted}"
        ) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if "Unsupported" in line or "GLOBAL" in line), lines[0] if lines else "")
    return f"{type(error).__name__}: {telling.split('. Please')[0][:200]}"


def parse_size(size: int | str, argument: str = "max_shard_size", small_b_is_bits: bool = False) -> int:
    """A number of bytes from ``5_000``, ``"10GB"`` (powers of 1000) or ``"5GiB"`` (of 1024).

    Args:
        argument: the user's name for ``size``, for the error.
        small_b_is_bits: ``"8Mb"`` is then a number of bits, and gives 1,000,000; ``"8Mib"`` is still a number of bytes.

    Raises:
        InvalidArgument: ``size`` is not a size, or negative.
    """
    if isinstance(size, int):
        found = size
    else:
        number, factor, bits = _split_size(size.strip())
        try:
            found = int(float(number) * factor) // (8 if bits and small_b_is_bits else 1)
        except (ValueError, OverflowError):
            found = -1
    if found < 0:
        raise InvalidArgument(
            f"{argument}={size!r}: expected a number of bytes that is not negative, or a string with a number and KB, "
            "MB, GB or TB (KiB, … for powers of 1024), as '10GB'"
        )
    return found


def _split_size(text: str) -> tuple[str, int, bool]:
    """The number before a unit, the bytes of the unit, and whether it could mean bits."""
    for letters, base in (("iB", 1024), ("B", 1000)):
        for exponent, prefix in enumerate("KMGT", 1):
            unit = f"{prefix}{letters}".upper()
            if text.upper().endswith(unit):
                return text[: -len(unit)], base**exponent, base == 1000 and text.endswith("b")
    return "", 0, False
