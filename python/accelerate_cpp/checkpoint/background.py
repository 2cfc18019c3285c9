"""One thread that writes while training continues."""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.util import Finalize

from accelerate_cpp._native import fail_at_exit

_log = logging.getLogger(__name__)
_writing: set[threading.Thread] = set()
_unraised: list[BaseException] = []
"""The errors of jobs of this process that no call has raised yet."""


class BackgroundWriter:
    """Runs one job at a time in a thread. The interpreter does not exit before the job has ended.

    A program that ends before a call could raise the error of a job ends with this error.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        _watch_the_end()  # now, so that it comes after the handlers of the program, and before other ranks are left

    def start(self, job: Callable[[], None]) -> None:
        """Begins ``job``; waits first for a running job, and raises its error.

        Where no thread can be started (the interpreter ends, or there are too many), the caller does the job.
        """
        self.wait()
        # Not a daemon: the interpreter joins it before anything is destroyed.
        thread = threading.Thread(target=self._run, args=(job,), name="checkpoint-writer", daemon=False)
        self._thread = thread
        _writing.add(thread)  # before it runs, as the program may end at once
        try:
            thread.start()
        except BaseException as error:
            if thread.ident is None:  # it has not begun
                self._thread = None
                _writing.discard(thread)
            if not isinstance(error, RuntimeError):  # an interrupt
                raise
            self._run(job)  # on this rank, while others already write, and wait for it

    def join(self) -> None:
        """Waits until no job runs."""
        thread = self._thread
        if thread is not None:
            thread.join()  # an interrupt ends the wait, not the job
            if self._thread is thread:  # else another caller has waited, too, and begun the next job
                self._thread = None

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
            del job  # and with it what it was to write, which the error would keep
            _let_go_of_locals(error)
            self._error = error
            _unraised.append(error)
        finally:
            _writing.discard(threading.current_thread())


def _let_go_of_locals(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def await_writers() -> None:
    """Waits until no job runs in this process."""
    for thread in [*_writing]:
        if thread is not threading.current_thread():
            thread.join()


def raise_at_the_end() -> None:
    """Raises the first error of a job that no call has raised; to be called when the program ends."""
    if _unraised:
        raise _unraised[0]


@functools.cache
def _watch_the_end() -> None:
    atexit.register(_end_with_what_is_unraised)
    if multiprocessing.parent_process() is not None:  # such a child that is a fork runs no handlers of atexit
        Finalize(None, _end_child_with_what_is_unraised, exitpriority=0)


def _end_with_what_is_unraised() -> bool:
    """Lets the program end as by an exception that it did not catch, if a job has left one; returns whether it did."""
    try:
        await_writers()  # an interrupt ends the wait of the interpreter
    except KeyboardInterrupt:
        fail_at_exit()
        raise
    if not _unraised:
        return False
    error = _unraised[0]
    _unraised.clear()
    fail_at_exit()
    if getattr(sys, "last_value", None) is None:  # else another exception has ended the program, and was shown
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    return True


def _end_child_with_what_is_unraised() -> None:
    if _end_with_what_is_unraised():
        raise SystemExit(1)


def _begin_as_a_fork() -> None:
    _writing.clear()
    _unraised.clear()
    _watch_the_end.cache_clear()


os.register_at_fork(after_in_child=_begin_as_a_fork)
