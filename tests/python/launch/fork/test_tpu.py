"""With a double of torch_xla's launcher: torch_xla does not import beside the torch that this package is built for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from accelerate_cpp.config import env_table
from accelerate_cpp.launch.fork.tpu import run_on_tpus


@pytest.fixture(autouse=True)
def four_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch_xla whose ``spawn`` forks four processes and raises when one of them fails."""

    def spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int | None = None, **options: Any) -> None:
        assert (nprocs, options) == (None, {"start_method": "fork"})
        pids = [os.fork() or _become(fn, rank, args) for rank in range(4)]
        if sum(os.waitpid(pid, 0)[1] for pid in pids):
            raise RuntimeError("a process failed")

    launcher = ModuleType("torch_xla.distributed.xla_multiprocessing")
    launcher.spawn = spawn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)
    for package in ("torch_xla", "torch_xla.distributed"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))


def _become(fn: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> int:
    code = 1
    try:
        os.environ["TPU_RANK"] = str(rank)
        fn(rank, *args)
        code = 0
    finally:
        os._exit(code)


def test_every_tpu_runs_the_task_and_returns_its_value() -> None:
    offset = 10
    assert run_on_tpus(lambda: offset + int(os.environ["TPU_RANK"]), None) == [10, 11, 12, 13]


def test_nothing_returned_is_nothing() -> None:
    assert run_on_tpus(lambda: None, None) is None


def test_workers_know_the_precision_and_that_they_were_forked() -> None:
    values = run_on_tpus(lambda: (os.environ["ACCELERATE_MIXED_PRECISION"], env_table.FORK_LAUNCHED.get()), "bf16")
    assert values == [("bf16", True)] * 4


def test_error_of_the_launcher_is_raised() -> None:
    with pytest.raises(RuntimeError, match="a process failed"):
        run_on_tpus(lambda: 1 // 0, None)
