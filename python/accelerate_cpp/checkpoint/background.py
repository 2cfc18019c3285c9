"""One thread that writes while training continues."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable

from accelerate_cpp._native import fail_at_exit

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs one job at a time in a thread. The interpreter does not exit before the job has ended.

    A program that ends before a call could raise the error of a job ends with this error.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begins ``job``; waits first for a running job, and raises its error.

        Where no thread can be started (the interpreter ends, or there are too many), the caller does the job.
        """
        self.wait()
        _watch_the_end()
        # Not a daemon: the interpreter joins it before anything is destroyed.
        thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # on this rank, while others already write, and wait for it
            self._run(job)
        else:
            self._thread = thread

    def join(self) -> None:
        """Waits until no job runs."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """Waits until no job runs; raises the error of the last one, once."""
        self.join()
        error, self._error = self._error, None
        if error is not None:
            if error in _unraised:  # not in a fork of the process whose error it is
                _unraised.remove(error)
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            # Logged as well: it may be long until a call raises it.
            _log.error("a checkpoint was not written: %s", error)
            self._error = error
            _unraised.append(error)


_unraised: list[BaseException] = []
"""The errors of jobs of this process that no call has raised yet."""
os.register_at_fork(after_in_child=_unraised.clear)


def raise_at_the_end() -> None:
    """Raises the first error of a job that no call has raised; to be called when the program ends."""
    if _unraised:
        raise _unraised[0]


@functools.cache
def _watch_the_end() -> None:
    atexit.register(_end_with_what_is_unraised)  # now, so that it comes before what leaves the other processes


def _end_with_what_is_unraised() -> None:
    """Lets the program end as by an exception that it did not catch, unless it does already."""
    if not _unraised or getattr(sys, "last_value", None) is not None:
        return
    error = _unraised[0]
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    fail_at_exit()
