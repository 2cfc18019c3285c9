"""How torch learns of backend shm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend
from accelerate_cpp.comm import backend
from accelerate_cpp.comm.backend import BACKEND_NAME, register


def run(script: str) -> str:
    """The output of ``script`` in a process of its own."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def _no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_entry_point_loads_neither_torch_nor_the_core() -> None:
    loaded = run("import sys, accelerate_cpp.comm.backend; print(*sys.modules)").split()
    assert "accelerate_cpp.comm.backend" in loaded
    assert {"torch", "accelerate_cpp._native", "accelerate_cpp._C"}.isdisjoint(loaded)


def test_registering_does_not_load_the_core() -> None:
    script = "import sys; from accelerate_cpp.comm.backend import register; register(); print(*sys.modules)"
    assert {"accelerate_cpp._native", "accelerate_cpp._C"}.isdisjoint(run(script).split())


def test_registering_twice_is_registering_once() -> None:
    register()
    register()
    assert dist.Backend.backend_list.count(BACKEND_NAME) == 1
    assert dist.Backend.backend_capability[BACKEND_NAME] == ["cpu"]


def test_registering_without_distributed_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.setattr(dist.Backend, "backend_list", [])
    register()
    assert dist.Backend.backend_list == []


@pytest.mark.usefixtures("_no_group")
@pytest.mark.parametrize("name", ["shm", "cpu:shm"])
def test_torch_creates_the_backend_by_its_name(name: str) -> None:
    register()
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    data = torch.ones(2)
    dist.all_reduce(data)
    assert data.tolist() == [1, 1]
    assert dist.group.WORLD is not None
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), C10dBackend)


@pytest.mark.parametrize(("text", "expected"), [("", 30.0), ("0.5", 0.5)])
def test_the_environment_says_after_how_long_a_wait_is_reported(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: float
) -> None:
    seen = []

    def create(
        store: dist.Store, rank: int, size: int, timeout: timedelta, warn_after: timedelta, numbers: list[int]
    ) -> None:
        seen.append((rank, size, timeout, warn_after, numbers))

    monkeypatch.setattr("accelerate_cpp._native.create_backend", create)
    monkeypatch.setenv("ACCELERATE_CPP_SLOW_WAIT_SECONDS", text)
    asked = dist.distributed_c10d._DistributedBackendOptions()
    asked.store, asked.group_rank, asked.group_size = dist.HashStore(), 0, 1
    asked.timeout, asked.global_ranks_in_group = timedelta(seconds=9), [3]
    backend._create(asked, None)
    assert seen == [(0, 1, timedelta(seconds=9), timedelta(seconds=expected), [3])]
