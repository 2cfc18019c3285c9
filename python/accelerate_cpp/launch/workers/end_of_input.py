"""The end of standard input, for launchers that wait for something else: whoever started them has gone."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from accelerate_cpp.launch.workers.program import STDERR, STDIN, STDOUT

_CHUNK_BYTES = 64 * 1024
_LOOK_SECONDS = 1.0


@contextmanager
def watched_stdin(on_end: Callable[[], None]) -> Iterator[None]:
    """While entered, a thread calls ``on_end`` when the standard input of this process ends."""
    is_over, lock = False, threading.Lock()

    def watch() -> None:
        while not _has_ended(None):
            pass
        with lock:
            if not is_over:
                on_end()

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
        if _has_ended(_LOOK_SECONDS):
            if os.getppid() == owner:
                os.kill(owner, signal.SIGTERM)
            break
    os._exit(0)


def _has_ended(seconds: float | None) -> bool:
    """Whether standard input has ended, or there is none. Takes what has come, or comes within ``seconds``."""
    try:
        return bool(select.select([STDIN], [], [], seconds)[0]) and not os.read(STDIN, _CHUNK_BYTES)
    except BlockingIOError:  # somebody else has taken it
        return False
    except OSError:
        return True
