"""Objects in files: how a function is sent to another process, and its result is sent back.

A file has the number of parts and their sizes, 8 bytes each, and then the parts: a pickle, and the bytes of the
tensors and arrays in it. Each part starts at a multiple of 64 bytes. Readers map large files, so that tensors are not
copied before they are written to, and no reader sees what another writes.

Importing this module loads cloudpickle.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import cloudpickle

from accelerate_cpp.comm.memory_file import memory_file

_ALIGNMENT_BYTES = 64
_MAPPED_BYTES = 1024 * 1024
"""From this size on files are mapped. Below it a copy costs less than a mapping, which keeps a descriptor open."""


class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # it has no type hints
    """cloudpickle, with the bytes of tensors outside the pickle. Tensors of any device arrive on the CPU.

    Functions keep the file name of their code, which tracebacks show: cloudpickle 3.1.3 replaces it.
    """

    def __init__(self) -> None:
        self._stream = io.BytesIO()
        self._buffers: list[pickle.PickleBuffer] = []
        super().__init__(self._stream, protocol=5, buffer_callback=self._buffers.append)

    def reducer_override(self, value: Any) -> Any:
        """Called by ``pickle`` for all but the simplest objects."""
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.storage.TypedStorage:
            return _typed_storage, (value._untyped_storage, value.dtype)
        if torch is not None and type(value) is torch.UntypedStorage:
            on_host = self.on_host(value)
            return _storage, (pickle.PickleBuffer(torch.empty(0, dtype=torch.uint8).set_(on_host).numpy()),)
        if isinstance(value, CodeType):
            constructor, arguments = self.dispatch_table[CodeType](value)
            return _code, (constructor, arguments, value.co_filename)
        return super().reducer_override(value)

    def on_host(self, storage: Any) -> Any:
        """The memory of a tensor as memory of the host."""
        return storage.cpu()

    def write(self, value: object, file: int) -> None:
        """Makes ``value`` the contents of the file with this descriptor. Raises what ``pickle`` raises."""
        self.dump(value)
        parts = [self._stream.getbuffer(), *(buffer.raw() for buffer in self._buffers)]
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        with open(file, "wb", closefd=False) as out:
            out.write(struct.pack(f"={len(parts) + 1}Q", len(parts), *map(len, parts)))
            for part in parts:
                out.write(b"\0" * (-out.tell() % _ALIGNMENT_BYTES))
                out.write(part)


def read(file: int) -> Any:
    """The object in the file with this descriptor, which may be closed then; the file must no longer change."""
    contents = _contents(file)
    (count,) = struct.unpack_from("=Q", contents)
    start = 8 * (count + 1)
    parts = []
    for size in struct.unpack_from(f"={count}Q", contents, 8):
        start += -start % _ALIGNMENT_BYTES
        parts.append(contents[start : start + size])
        start += size
    return pickle.loads(parts[0], buffers=parts[1:])


@contextmanager
def packed(value: object, pickler: Pickler | None = None) -> Iterator[int]:
    """The descriptor of a new memory file with ``value`` in it."""
    file = memory_file("accelerate-cpp-parcel")
    try:
        (pickler or Pickler()).write(value, file)
        yield file
    finally:
        os.close(file)


def _contents(file: int) -> memoryview:
    size = os.fstat(file).st_size
    if size >= _MAPPED_BYTES:
        return memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
    return memoryview(bytearray(os.pread(file, size, 0)))


def _code(constructor: Callable[..., CodeType], arguments: tuple[Any, ...], filename: str) -> CodeType:
    return constructor(*arguments).replace(co_filename=filename)


def _storage(contents: Any) -> Any:
    import torch

    if len(contents) == 0:  # frombuffer refuses it
        return torch.UntypedStorage(0)
    return torch.frombuffer(contents, dtype=torch.uint8).untyped_storage()


def _typed_storage(untyped: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)
