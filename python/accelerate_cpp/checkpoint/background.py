"""One thread that writes while training continues."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs one job at a time in a thread. The interpreter does not exit before the job has ended."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begins ``job``; waits first for a running job, and raises its error.

        Where no thread can be started (the interpreter ends, or there are too many), the caller does the job.
        """
        self.wait()
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
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            # Logged as well, since a program may end without another call that could raise it.
            _log.error("a checkpoint was not written: %s", error)
            self._error = error
