"""The launcher: two processes, one after the other, in new interpreters as ``start_method="spawn"`` has them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


def spawn(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int | None = None, start_method: str = "spawn"
) -> None:
    context = multiprocessing.get_context(start_method)
    for rank in range(2 if nprocs is None else nprocs):
        process = context.Process(target=fn, args=(rank, *args))
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"process {rank} ended with exit code {process.exitcode}")
