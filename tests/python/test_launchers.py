from __future__ import annotations

import inspect
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp import launchers
from accelerate_cpp.errors import AccelerateError, InvalidArgument
from accelerate_cpp.launchers import debug_launcher, notebook_launcher
from accelerate_cpp.runtime import current


def test_arguments_are_the_originals() -> None:
    assert list(inspect.signature(notebook_launcher).parameters) == [
        "function",
        "args",
        "num_processes",
        "mixed_precision",
        "use_port",
        "master_addr",
        "node_rank",
        "num_nodes",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_conf",
        "rdzv_id",
        "max_restarts",
        "monitor_interval",
        "log_line_prefix_template",
    ]
    assert list(inspect.signature(debug_launcher).parameters) == ["function", "args", "num_processes"]


def test_one_process_runs_in_this_one() -> None:
    seen: list[tuple[int, int]] = []
    notebook_launcher(lambda value: seen.append((os.getpid(), value)), (3,), num_processes=1)
    assert seen == [(os.getpid(), 3)]


def test_without_gpus_no_number_means_one_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen: list[int] = []
    notebook_launcher(lambda: seen.append(os.getpid()))
    assert seen == [os.getpid()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mixed_precision": "fp7"}, "mixed_precision='fp7'"),
        ({"num_nodes": 2}, "one machine only"),
        ({"node_rank": 1}, "one machine only"),
        ({"max_restarts": 1}, "max_restarts=1"),
        ({"log_line_prefix_template": "${rank}"}, "log_line_prefix_template"),
        ({"use_port": "http"}, "use_port='http'"),
        ({"num_processes": 0}, "num_processes=0"),
    ],
)
def test_what_is_not_supported_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        notebook_launcher(lambda: None, **{"num_processes": 2, **arguments})


def test_initialised_cuda_is_refused_before_any_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True)))  # type: ignore[arg-type]
    with pytest.raises(AccelerateError, match=r"CUDA is already initialised.*Restart the kernel"):
        notebook_launcher(lambda: None, num_processes=2)


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_existing_process_group_is_refused(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="process group of 2"):
        launcher(lambda: None, num_processes=2)


def test_port_that_was_chosen_reaches_the_workers_and_the_default_is_a_free_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def show() -> None:
        print(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])

    notebook_launcher(show, num_processes=2, use_port="4321", master_addr="localhost")
    assert capsys.readouterr().out == "localhost 4321\n" * 2
    notebook_launcher(show, num_processes=2)
    assert "29500" not in capsys.readouterr().out


def test_debug_launcher_uses_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    debug_launcher(lambda: print(os.environ["ACCELERATE_USE_CPU"], os.environ["WORLD_SIZE"]))
    assert capsys.readouterr().out == "true 2\n" * 2


def test_worker_starts_without_the_session_of_its_parent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = current.accumulation
    monkeypatch.setattr(current, "session", object())
    debug_launcher(lambda: print(current.session, current.accumulation is inherited))
    assert capsys.readouterr().out == "None False\n" * 2
    assert current.accumulation is inherited


def test_threads_of_torch_are_the_workers_share(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launchers.debug_launcher(lambda: print(torch.get_num_threads()))
    assert capsys.readouterr().out == "3\n" * 2


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_precision_reaches_the_function(
    num_processes: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)

    def show() -> None:
        print("precision", os.environ["ACCELERATE_MIXED_PRECISION"])

    notebook_launcher(show, num_processes=num_processes, mixed_precision="bf16")
    assert capfd.readouterr().out.split() == ["precision", "bf16"] * num_processes
    assert "ACCELERATE_MIXED_PRECISION" not in os.environ
