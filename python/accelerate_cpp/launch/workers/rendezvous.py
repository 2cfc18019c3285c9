"""The memory file through which the workers of one host meet: without name or port, so nothing can clash or leak."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate_cpp.comm.memory_file import memory_file


@contextmanager
def rendezvous_file() -> Iterator[int]:
    """Yields the descriptor of an empty memory file; workers inherit it and open it as ``/proc/self/fd/<n>``."""
    descriptor = memory_file("accelerate-cpp-rendezvous")
    try:
        yield descriptor
    finally:
        os.close(descriptor)
