"""Launched functions on TPUs, through torch_xla's own launcher."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.launch.fork.results import send, values_of
from accelerate_cpp.launch.plan.environment import exported


def run_on_tpus(task: Callable[[], object], mixed_precision: str | None) -> list[Any] | None:
    """Runs ``task()`` in one process per TPU, forked by ``torch_xla``, and returns what they returned, by rank.

    It has only been run in the tests, with a replacement for torch_xla's launcher, and never on a TPU. torch_xla
    determines how workers print, fail and are interrupted.
    """
    launcher = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    told = {env_table.MIXED_PRECISION: mixed_precision, env_table.FORK_LAUNCHED: True}
    with tempfile.TemporaryDirectory(prefix="accelerate-cpp-") as folder, exported(told):
        # Without a number it starts one process for each TPU; the only number that PJRT accepts is 1.
        launcher.spawn(_Worker(task, Path(folder)), nprocs=None, start_method="fork")
        return _values_in(sorted(Path(folder).iterdir(), key=lambda file: int(file.name)))


class _Worker:
    """What torch_xla calls in each process, with the rank."""

    def __init__(self, task: Callable[[], object], folder: Path) -> None:
        self._task = task
        self._folder = folder

    def __call__(self, rank: int) -> None:
        with (self._folder / str(rank)).open("wb") as file:
            send(self._task(), file.fileno())


def _values_in(paths: Sequence[Path]) -> list[Any] | None:
    files: list[int] = []
    try:
        files += (os.open(path, os.O_RDONLY) for path in paths)
        return values_of(files)
    finally:
        for file in files:
            os.close(file)
