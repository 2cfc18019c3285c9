"""The end of standard input as SIGTERM, for launchers that wait for something else: whoever started them has gone."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from accelerate_cpp.launch.workers.program import STDERR, STDIN, STDOUT

_CHUNK_BYTES = 64 * 1024
_LOOK_SECONDS = 1.0


@contextmanager
def ended_with_stdin(asked: bool) -> Iterator[None]:
    """While entered, this process gets SIGTERM when its standard input ends, if ``asked``."""
    is_over, lock = False, threading.Lock()

    def watch() -> None:
        _read_to_the_end()
        with lock:
            if not is_over:
                os.kill(os.getpid(), signal.SIGTERM)

    if asked:
        threading.Thread(target=watch, name="accelerate-cpp-stdin", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            is_over = True


def end_next_program_with_stdin() -> None:
    """The program that this process becomes gets SIGTERM when the standard input of this one ends, and no other input.

    A process of its own watches it, and ends with that program.
    """
    owner = os.getpid()
    if os.fork() == 0:
        _watch_for(owner)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)


def _watch_for(owner: int) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner, which may take its time
    nothing = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (STDOUT, STDERR):  # whoever reads them waits for the owner alone
        os.dup2(nothing, descriptor)
    while os.getppid() == owner:
        if select.select([STDIN], [], [], _LOOK_SECONDS)[0] and not _chunk():
            if os.getppid() == owner:
                os.kill(owner, signal.SIGTERM)
            break
    os._exit(0)


def _read_to_the_end() -> None:
    while _chunk():
        pass


def _chunk() -> bytes:
    """What comes from standard input; empty at its end, or where there is none."""
    try:
        return os.read(STDIN, _CHUNK_BYTES)
    except OSError:
        return b""
