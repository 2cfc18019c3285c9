"""Reports to the launcher when a worker joins a process group, that it will save, and that an error ends it.

They go over a pipe that all workers of a launcher inherit, so that the launcher notices when a worker has ended for
which others wait, waits for those that save their state before they end, and can tell an error while they end.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate_cpp.config import env_table

MESSAGE = struct.Struct("=IB")
"""The number by which its launcher knows the worker, and one of the following. It is written in one piece."""
BEGINS, JOINED, GAVE_UP, SAVES, RAISED = range(5)


@contextmanager
def announced_joining() -> Iterator[None]:
    """A block in which this process joins a process group; reports that to the launcher, if it wants to know."""
    _announce(BEGINS)
    try:
        yield
    except BaseException:
        _announce(GAVE_UP)
        raise
    _announce(JOINED)


def announce_saving() -> None:
    """From now on, this process saves its state before it ends when it is told to end."""
    _announce(SAVES)


def announce_error() -> None:
    """An error ends this process, and its report is where the launcher reads it."""
    _announce(RAISED)


def _announce(event: int) -> None:
    place = env_table.JOINING.get()
    if place is None:
        return
    descriptor, pipe, worker = place
    try:
        found = os.fstat(descriptor)
        # A program that a worker starts may have inherited the variable without the descriptor.
        if stat.S_ISFIFO(found.st_mode) and found.st_ino == pipe:
            os.write(descriptor, MESSAGE.pack(worker, event))
    except OSError:  # closed, or the launcher has gone: its end is not this module's to report
        return
