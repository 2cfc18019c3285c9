"""The processes of a data loader that end while they hand over a batch."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

WAIT_SECONDS = 2.0
"""How long a process whose connection has broken may take to end."""
_TOLD_BY_WORKER = "in DataLoader worker process"  # torch, of an error that a process has met and handed over


class Read:
    """The batches of a pass over a loader; an error names the process of the loader that it comes from.

    A process that ends between a batch and its tensors breaks a connection before it can be seen to have ended. Torch
    then raises the error of the connection, which does not say whose it is.

    Args:
        batches: what is read.
        iterator: torch's iterator over the loader, from which they come.
    """

    def __init__(self, batches: Iterator[Any], iterator: Any) -> None:
        self._batches, self._iterator = batches, iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next batch.

        Raises:
            RuntimeError: a process has ended; the text begins as torch's own does.
        """
        try:
            return next(self._batches)
        except (ConnectionError, EOFError, FileNotFoundError) as error:
            lost = [] if _TOLD_BY_WORKER in str(error) else _lost_workers(self._iterator)
            if not lost:
                raise
            pids = ", ".join(str(worker.pid) for worker in lost)
            codes = ", ".join(str(worker.exitcode) for worker in lost)
            raise RuntimeError(
                f"DataLoader worker (pid(s) {pids}) exited unexpectedly while it handed over a batch; exit code {codes}"
            ) from error


def _lost_workers(iterator: Any) -> list[Any]:
    """The processes that read for torch's ``iterator``, still have to, and end now."""
    workers = getattr(iterator, "_workers", ())
    if not workers:
        return []
    have_to_read = getattr(iterator, "_workers_status", [True] * len(workers))
    reading = [worker for worker, has_to in zip(workers, have_to_read, strict=True) if has_to]
    ending = connection.wait([worker.sentinel for worker in reading], WAIT_SECONDS)
    for worker in reading:
        if worker.sentinel in ending:
            worker.join(WAIT_SECONDS)  # the system closes what a process has before it says that it has ended
    return [worker for worker in reading if not worker.is_alive()]
