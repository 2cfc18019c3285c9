from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.fork import forked_plan
from accelerate_cpp.launch.fork.forked_plan import (
    function_group,
    obstacle_to_forks,
    processes_of_notebook,
    runs_on_tpus,
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it with what the machine has."""
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)

    def has(gpus: int = 0, tpu: bool = False, colab: bool = False, initialised: str | None = None) -> None:
        monkeypatch.setattr(forked_plan, "gpu_count", lambda environ: gpus)
        monkeypatch.setattr(forked_plan, "has_tpu", lambda environ: tpu)
        monkeypatch.setattr(forked_plan, "initialised", lambda: initialised)
        if colab:
            monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))

    return has


@pytest.mark.parametrize(
    ("gpus", "colab", "asked", "expected"),
    [
        (0, False, None, 1),
        (1, False, None, 1),
        (4, False, None, 4),
        (0, False, 3, 3),
        (4, False, 2, 2),
        (0, True, None, 1),
        (0, True, 8, 1),
        (1, True, 2, 1),
        (2, True, None, 2),
        (2, True, 2, 2),
    ],
)
def test_all_gpus_are_used_or_the_processes_that_are_asked_for(
    gpus: int, colab: bool, asked: int | None, expected: int, machine: Any
) -> None:
    machine(gpus, colab=colab)
    assert processes_of_notebook(asked) == expected


def test_use_cpu_hides_gpus_and_tpus(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(4, tpu=True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "yes")
    assert processes_of_notebook(None) == 1
    assert not runs_on_tpus(None)


@pytest.mark.parametrize(
    ("gpus", "tpu", "asked", "expected"),
    [(0, True, None, True), (0, True, 8, True), (0, True, 1, False), (0, False, None, False), (1, True, None, False)],
)
def test_tpus_are_used_where_there_are_no_gpus(
    gpus: int, tpu: bool, asked: int | None, expected: bool, machine: Any
) -> None:
    machine(gpus, tpu=tpu)
    assert runs_on_tpus(asked) is expected


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True])
def test_number_of_processes_must_be_a_positive_integer(count: object) -> None:
    with pytest.raises(InvalidArgument, match="expected an integer of at least 1"):
        function_group(count)  # type: ignore[arg-type]


def test_clean_process_can_fork(machine: Any) -> None:
    machine()
    assert obstacle_to_forks(cpu=False) is None


@pytest.mark.parametrize("kind", ["CUDA", "ROCm", "XPU"])
def test_initialised_gpu_is_an_obstacle_unless_only_the_cpu_is_used(
    kind: str, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(initialised=kind)
    assert obstacle_to_forks(cpu=True) is None
    obstacle = obstacle_to_forks(cpu=False)
    assert obstacle is not None
    assert obstacle.startswith(f"{kind} is already initialised in this process (by a call before")
    monkeypatch.setattr(forked_plan, "first_use", lambda kind: "`x.cuda()` (Cell In[2], line 1)")
    assert "process, by `x.cuda()` (Cell In[2], line 1), and a fork" in str(obstacle_to_forks(cpu=False))


@pytest.mark.parametrize("cpu", [True, False])
def test_a_library_whose_threads_run_is_an_obstacle(cpu: bool, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()
    monkeypatch.setattr(forked_plan, "started_library", lambda: "JAX")
    assert str(obstacle_to_forks(cpu=cpu)).startswith("JAX has started its threads in this process")


@pytest.mark.parametrize("size", [1, 2])
def test_process_group_of_one_is_an_obstacle_and_a_larger_one_is_refused(
    size: int, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: size)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)  # type: ignore[arg-type]
    if size == 1:
        assert "its own process group" in str(obstacle_to_forks(cpu=True))
        return
    with pytest.raises(InvalidArgument, match="process group of 2"):
        obstacle_to_forks(cpu=True)
