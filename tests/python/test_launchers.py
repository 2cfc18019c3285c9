from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp import launchers
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.fork import fork_server, forked_plan
from accelerate_cpp.launch.fork.forked import Supervision
from accelerate_cpp.launch.plan.environment import WorkerGroup
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
    assert notebook_launcher(lambda value: (os.getpid(), value), (3,), num_processes=1) == [(os.getpid(), 3)]
    assert notebook_launcher(lambda: None, num_processes=1) is None


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_what_the_function_returns_comes_back_by_rank(launcher: Any) -> None:
    assert launcher(lambda value: (int(os.environ["RANK"]), value), (3,), num_processes=2) == [(0, 3), (1, 3)]
    assert launcher(lambda: None, num_processes=2) is None


@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        ((None, ()), "expected a function, found NoneType"),
        ((print, 1), r"found int. A tuple of one has a comma: args=\(1,\)$"),
        ((print, "ab"), "has to be a tuple or a list of arguments, found str"),
    ],
)
def test_a_call_that_was_written_otherwise_is_explained(launcher: Any, call: tuple[Any, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{launcher.__name__}: .*{words}"):
        launcher(*call)


def test_without_gpus_no_number_means_one_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert notebook_launcher(os.getpid) == [os.getpid()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mixed_precision": "fp7"}, "mixed_precision='fp7'"),
        ({"num_nodes": 0}, "num_nodes=0"),
        ({"num_nodes": 2, "node_rank": 2}, "num_nodes=2, node_rank=2"),
        ({"node_rank": 1}, "num_nodes=1, node_rank=1"),
        ({"num_nodes": 2, "rdzv_backend": "c10d"}, "rdzv_backend='c10d'"),
        ({"num_nodes": 2, "rdzv_endpoint": "here"}, "rdzv_endpoint='here'"),
        ({"num_nodes": 2, "rdzv_endpoint": "here:http"}, "rdzv_endpoint='http'"),
        ({"num_nodes": 2, "max_restarts": 1}, "max_restarts=1.*num_nodes=2"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"use_port": "http"}, "use_port='http'"),
        ({"num_processes": 0}, "num_processes=0"),
    ],
)
def test_what_is_not_supported_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        notebook_launcher(lambda: None, **{"num_processes": 2, **arguments})


@pytest.mark.filterwarnings("error")
def test_initialised_cuda_takes_the_workers_from_a_helper_process_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def run(
        task: Any, used: Any, group: WorkerGroup, results: Any, preload: tuple[str, ...], display: Any, watch: Any
    ) -> None:
        assert (display, watch) == (None, Supervision())
        seen.append((task(), used, group.num_processes, len(results), preload))

    def train(value: int) -> int:
        return value + 1

    monkeypatch.setattr(forked_plan, "initialised", lambda: "CUDA")
    monkeypatch.setattr(fork_server, "run_in_fork_server", run)
    monkeypatch.setattr(launchers, "run_forked", None)
    launchers._tell_once.cache_clear()
    with pytest.warns(UserWarning, match=r"^CUDA is already initialised .* from a helper process instead") as warnings:
        notebook_launcher(train, (3,), num_processes=2)
    notebook_launcher(train, (3,), num_processes=2)  # warnings are errors here
    assert [warning.filename for warning in warnings] == [__file__]
    modules = ("torch", "accelerate_cpp.accelerator", "accelerate_cpp.launchers")
    assert seen == [(4, (train, (3,)), 2, 2, modules)] * 2


def test_cpu_workers_are_forks_of_this_process_although_cuda_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_plan, "initialised", lambda: "CUDA")
    assert debug_launcher(os.getppid) == [os.getpid()] * 2


def test_tpus_run_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "runs_on_tpus", lambda num_processes: num_processes is None)
    monkeypatch.setattr(launchers, "run_on_tpus", lambda task, precision: [task(), precision])
    assert notebook_launcher(lambda value: value + 1, (3,), mixed_precision="bf16") == [4, "bf16"]
    assert notebook_launcher(lambda value: value + 1, (3,), num_processes=1) == [4]


def test_each_machine_starts_its_share_of_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    def place() -> tuple[str, ...]:
        return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))

    found = notebook_launcher(place, num_processes=2, num_nodes=3, node_rank=1, master_addr="10.0.0.1")
    assert found == [("2", "6", "0", "10.0.0.1", "29500"), ("3", "6", "1", "10.0.0.1", "29500")]
    found = notebook_launcher(place, num_processes=1, num_nodes=2, rdzv_endpoint="10.0.0.2:77")
    assert found == [("0", "2", "0", "10.0.0.2", "77")]


@pytest.mark.parametrize("num_processes", [1, 2])
def test_function_that_failed_is_run_again(
    num_processes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_twice() -> int:
        with (tmp_path / os.environ.get("RANK", "0")).open("a+") as log:
            log.write(".")
            attempt = log.tell()
        if attempt < 3 and env_table.RANK.get() in (None, 0):
            raise ValueError(f"attempt {attempt}")
        return attempt

    found = notebook_launcher(fail_twice, num_processes=num_processes, max_restarts=5)
    assert found is not None
    assert found[0] == 3
    shown = capsys.readouterr().err
    assert "rank 0 failed: ValueError: attempt 2" in shown
    assert "restart 2 of 5" in shown
    assert "restart 3" not in shown


def test_lines_have_the_prefix_that_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    template = "[${role_name}${rank}/${local_rank} ${other}] "
    notebook_launcher(lambda: print("a\nb"), num_processes=2, log_line_prefix_template=template)
    lines = [f"[default{rank}/{rank} ${{other}}] {text}" for rank in (0, 1) for text in "ab"]
    assert sorted(capsys.readouterr().out.splitlines()) == lines


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
    debug_launcher(lambda: print(env_table.USE_CPU.get(), os.environ["WORLD_SIZE"]))
    assert capsys.readouterr().out == "True 2\n" * 2


def test_worker_starts_without_the_session_of_its_parent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = current.accumulation
    monkeypatch.setattr(current, "session", object())
    debug_launcher(lambda: print(current.session, current.accumulation is inherited))
    assert capsys.readouterr().out == "None False\n" * 2
    assert current.accumulation is inherited


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_function_makes_its_own_accelerator_although_there_is_one(num_processes: int) -> None:
    pytest.importorskip("torch")
    from accelerate_cpp import Accelerator
    from accelerate_cpp.state import AcceleratorState

    def train() -> tuple[int, str]:
        accelerator = Accelerator(cpu=True, mixed_precision="no", gradient_accumulation_steps=2)
        return accelerator.num_processes, accelerator.mixed_precision

    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    assert notebook_launcher(train, num_processes=num_processes) == [(num_processes, "no")] * num_processes
    assert AcceleratorState().mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 4


@pytest.mark.usefixtures("fresh_state")
@pytest.mark.parametrize("launcher", [notebook_launcher, debug_launcher])
def test_accelerator_of_this_process_is_refused_inside_the_function(launcher: Any) -> None:
    pytest.importorskip("torch")
    from accelerate_cpp import Accelerator

    def train() -> int:
        return device()

    def device() -> Any:
        return accelerator.device

    accelerator = Accelerator(cpu=True)
    with pytest.raises(InvalidArgument, match=r"^train uses `accelerator`, an Accelerator .* inside the function$"):
        launcher(train, num_processes=2)
    with pytest.raises(InvalidArgument, match=r"uses `args\[1\]`, an Accelerator"):
        launcher(lambda *args: None, (1, accelerator), num_processes=2)


def test_frames_of_the_package_are_not_shown_with_the_workers_error() -> None:
    with pytest.raises(RuntimeError, match="rank 0 failed: ZeroDivisionError") as failure:
        debug_launcher(lambda: 1 // 0, num_processes=1)
    assert [entry.name for entry in failure.traceback][1:] == ["debug_launcher"]
    assert failure.value.__cause__ is failure.value.__context__ is None


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
