"""Launched functions, and functions of launched scripts, on TPUs, through torch_xla's own launcher."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.fork.results import send, values_of
from accelerate_cpp.launch.plan.environment import exported, group_environment
from accelerate_cpp.launch.plan.launch_plan import LaunchPlan
from accelerate_cpp.launch.plan.tpus import TpuLaunch


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


def run_script_on_tpus(plan: LaunchPlan, tpus: TpuLaunch) -> int:
    """Calls the function of a script in one process per TPU, started by ``torch_xla``; returns the exit status.

    Raises:
        InvalidArgument: torch_xla is not installed, or cannot be imported.
    """
    try:
        launcher = importlib.import_module("torch_xla.distributed.xla_multiprocessing")
    except ImportError as error:
        raise InvalidArgument(
            f"launch on TPUs ({plan.settings['tpu'].source}): torch_xla cannot be imported ({error}); install the one "
            "that matches torch, such as pip install 'torch_xla[tpu]==2.9.*', or leave out --tpu"
        ) from error
    os.environ.update(group_environment(plan.group, os.environ) | env_table.render({env_table.FORK_LAUNCHED: True}))
    launcher.spawn(ScriptFunction(tpus), nprocs=1 if tpus.alone else None)
    return 0


class ScriptFunction:
    """What torch_xla calls in each process that :func:`run_script_on_tpus` starts, with the rank.

    Args:
        tpus: the script, its arguments, and the function.
    """

    def __init__(self, tpus: TpuLaunch) -> None:
        self._tpus = tpus

    def __call__(self, rank: int) -> None:
        """Imports the script, which so is not ``__main__``, and calls the function.

        Raises:
            InvalidArgument: the script has no such function.
        """
        asked = self._tpus
        name = asked.script
        if not asked.is_module:
            path = Path(asked.script).resolve()
            sys.path.insert(0, str(path.parent))
            name = path.stem
        sys.argv = [asked.script, *asked.arguments]
        module = importlib.import_module(name)
        function = getattr(module, asked.function, None)
        if not callable(function):
            raise InvalidArgument(
                f"{asked.script} has no function {asked.function!r}, which torch_xla is to call on each TPU; write one "
                "that trains, or name another with --main_training_function"
            )
        function()


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
