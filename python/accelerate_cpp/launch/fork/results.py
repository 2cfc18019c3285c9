"""The results of launched functions: each worker writes its own file, and the parent reads them at the end.

A file can hold values of any size without a concurrent reader. What is in the notebook's ``__main__`` is sent by its
name, so objects of its classes come back as objects of these classes.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from accelerate_cpp.comm.memory_file import memory_file


@contextmanager
def result_files(count: int) -> Iterator[tuple[int, ...]]:
    """The descriptors of so many empty memory files."""
    files: list[int] = []
    try:
        for _ in range(count):
            files.append(memory_file("accelerate-cpp-result"))
        yield tuple(files)
    finally:
        for file in files:
            os.close(file)


@dataclass(frozen=True)
class _Unsendable:
    """Represents a value that could not be sent."""

    kind: str
    reason: str


def send(value: object, file: int) -> None:
    """Writes ``value`` into ``file``, or the reason why that is impossible. ``None`` is an empty file."""
    if value is None:
        return
    pickler = _pickler()
    try:
        pickler().write(value, file)
    except Exception as error:
        pickler().write(_Unsendable(type(value).__qualname__, f"{type(error).__name__}: {error}"), file)


def values_of(files: Sequence[int]) -> list[Any] | None:
    """The values that the workers sent, by rank; ``None`` if all returned nothing.

    Warns of values that could not be sent, which are ``None`` in the list: by then training is done, and an error would
    lose what the other workers returned.
    """
    if not any(os.fstat(file).st_size for file in files):
        return None
    values: list[Any] = []
    for rank, file in enumerate(files):
        value = _read(file)
        if isinstance(value, _Unsendable):
            warnings.warn(
                f"rank {rank} returned a value of type {value.kind}, which cannot be sent to this process "
                f"({value.reason}); the list of results has None in its place",
                stacklevel=4,
            )
            value = None
        values.append(value)
    return values


def _read(file: int) -> Any:
    if os.fstat(file).st_size == 0:
        return None
    from accelerate_cpp.launch.fork import pickle_files as parcel

    try:
        return parcel.read(file)
    except Exception as error:  # for example a class that only exists in the worker
        return _Unsendable("unknown", f"{type(error).__name__}: {error}")


@functools.cache
def _pickler() -> Any:
    """The class of picklers for results; created at the first value, because it needs cloudpickle."""
    from accelerate_cpp.launch.fork.pickle_files import Pickler

    class ResultPickler(Pickler):
        def reducer_override(self, value: Any) -> Any:
            return value.__qualname__ if is_in_main(value) else super().reducer_override(value)

    return ResultPickler


def is_in_main(value: Any) -> bool:
    """Whether ``value`` is a class or a function that ``__main__`` has under its name."""
    if not isinstance(value, (type, FunctionType)) or value.__module__ != "__main__":
        return False
    found: Any = sys.modules.get("__main__")
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
