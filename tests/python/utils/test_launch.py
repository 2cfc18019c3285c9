"""Command and environment of a launch, and functions that others start."""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate.commands.launch as original_commands
import accelerate.utils.launch as original
import pytest
import torch.multiprocessing

from accelerate_cpp import Accelerator
from accelerate_cpp.commands.launch import launch_command_parser
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.state import AcceleratorState
from accelerate_cpp.utils import launch, patch_environment


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, where no configuration file and no variable of a launch counts."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text("import os, sys; print(os.environ['ACCELERATE_MIXED_PRECISION'], *sys.argv[1:])")
    return path


def parsed(*words: object) -> argparse.Namespace:
    return launch_command_parser().parse_args([str(word) for word in words])


def test_a_launch_of_one_process_is_a_command_and_an_environment(script: Path) -> None:
    args = parsed("--cpu", "--num_processes", 1, "--mixed_precision", "bf16", script, "--lr", 0.1)
    command, environment = launch.prepare_simple_launcher_cmd_env(args)
    assert command == [sys.executable, str(script), "--lr", "0.1"]
    assert environment["ACCELERATE_USE_CPU"] == "True"
    assert not environment.keys() & {"RANK", "WORLD_SIZE", "ACCELERATE_CPP_RENDEZVOUS_FD"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bf16", "--lr", "0.1"]


def test_a_configuration_file_counts(script: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("distributed_type: NO\nmixed_precision: fp16\nuse_cpu: true\n")
    _, environment = launch.prepare_simple_launcher_cmd_env(parsed("--config_file", tmp_path / "c.yaml", script))
    assert environment["ACCELERATE_MIXED_PRECISION"] == "fp16"


def test_several_processes_are_refused_there(script: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expected a launch of one process, found 2; pass args to launch_command"):
        launch.prepare_simple_launcher_cmd_env(parsed("--cpu", "--num_processes", 2, script))
    (tmp_path / "hosts").write_text("localhost\n")
    with pytest.raises(InvalidArgument, match="found 1 on the machines of a file of MPI"):
        launch.prepare_simple_launcher_cmd_env(
            parsed("--cpu", "--num_processes", 1, "--mpirun_hostfile", tmp_path / "hosts", script)
        )


def test_several_processes_have_an_environment_in_common(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_resources, "gpu_count", lambda *_: 2)
    monkeypatch.setenv("LOCAL_RANK", "7")
    args = parsed("--multi_gpu", "--num_processes", 2, "--main_process_port", 29999, script)
    given = dict(vars(args))
    environment = launch.prepare_multi_gpu_env(args)
    expected = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    assert environment.items() >= (expected | {"ACCELERATE_MIXED_PRECISION": "no"}).items()
    assert not environment.keys() & {"RANK", "LOCAL_RANK", "ACCELERATE_CPP_RENDEZVOUS_FD"}
    assert vars(args) == given | {"master_port": "29999"}


def test_the_environment_of_several_processes_needs_no_script() -> None:
    args = argparse.Namespace(num_processes=1, main_process_ip="127.0.0.1", main_process_port=0, use_fsdp=False)
    assert launch.prepare_multi_gpu_env(args)["ACCELERATE_MIXED_PRECISION"] == "no"
    assert int(args.master_port) > 0


def both_prepared(*words: object) -> tuple[Any, Any]:
    """Commands, environments and arguments of a launch through DeepSpeed, of the original and of this package."""
    found = []
    for parser, prepare in (
        (original_commands.launch_command_parser, original.prepare_deepspeed_cmd_env),
        (launch_command_parser, launch.prepare_deepspeed_cmd_env),
    ):
        args = parser().parse_args(["--use_deepspeed", *(str(word) for word in words)])
        args.deepspeed_fields_from_accelerate_config = "Zero_Stage"
        if parser is original_commands.launch_command_parser:
            args.mixed_precision = args.mixed_precision or "no"
            args.num_machines = args.num_machines or 1
            args.machine_rank = args.machine_rank or 0
        command, environment = prepare(args)
        found.append((command, environment, args))
    return found[0], found[1]


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed_multinode_launcher", "pdsh", "--main_process_ip", "10.0.0.1", "--zero_stage", 3],
        ["--offload_param_device", "CPU", "--main_process_port", 29777, "--gradient_clipping", 1, "--debug"],
        ["--deepspeed_exclusion_filter", "a:0", "--deepspeed_multinode_launcher", "slurm"],
        ["--deepspeed_inclusion_filter", "a", "--module", "--zero3_init_flag", "true"],
        ["--no_python", "--deepspeed_config_file", "ds.json", "--mixed_precision", "bf16"],
        ["--deepspeed_multinode_launcher", "nossh", "--machine_rank", 1],
    ],
)
def test_the_command_of_deepspeeds_launcher_is_the_originals(
    script: Path, monkeypatch: pytest.MonkeyPatch, words: list[object]
) -> None:
    monkeypatch.chdir(script.parent)
    monkeypatch.setattr(original, "compare_versions", lambda *_: False)  # which DeepSpeed is installed
    (script.parent / "hosts").write_text("a slots=2\nb slots=2\n")
    words = ["--num_machines", 2, "--num_processes", 4, "--deepspeed_hostfile", "hosts", *words, script, "--lr", 1]
    (theirs, environment, _), (ours, own_environment, args) = both_prepared(*words)
    if "nossh" in words:  # the original's scripts get an argument there that they may not know
        theirs.insert(theirs.index("--no_ssh") + 1, "--no_local_rank")
    assert ours == theirs
    assert own_environment.items() >= environment.items()
    assert args.main_process_port == int(theirs[theirs.index("--master_port") + 1])


@pytest.mark.parametrize(
    "words",
    [
        ["--num_processes", 2, "--zero_stage", 1],
        ["--num_machines", 2, "--num_processes", 4, "--machine_rank", 1, "--main_process_ip", "a", "--same_network"],
        ["--num_machines", 2, "--num_processes", 4, "--main_process_ip", "127.0.0.1"],
    ],
)
def test_without_its_launcher_torchrun_is_told_what_the_original_tells_it(script: Path, words: list[object]) -> None:
    words = ["--deepspeed_multinode_launcher", "standard", "--main_process_port", host_resources.free_port(), *words]
    (theirs, environment, told), (ours, own_environment, args) = both_prepared(*words, script)
    assert (ours, theirs) == (None, None)
    assert own_environment.items() >= environment.items()
    names = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint")
    expected = {name: getattr(told, name) for name in names if hasattr(told, name)}
    assert {name: getattr(args, name) for name in names if hasattr(args, name)} == expected
    assert not own_environment.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK"}


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "bert", "--epochs", "3", "--lr", "1e-3", "--do", "True", "--no", "False"],
        ["--a-b", "1", "--c_d", "x y", "-e", "1.0"],
        ["--a", "true", "--b", "None"],
        [],
    ],
)
def test_flags_become_a_dict_as_in_the_original(words: list[str]) -> None:
    assert launch._convert_nargs_to_dict(words) == original._convert_nargs_to_dict(words)


def test_a_negative_number_is_a_value() -> None:
    assert launch._convert_nargs_to_dict(["--a", "-1", "--b", "-0.5"]) == {"a": -1, "b": -0.5}


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (["--a"], "--a"),
        (["--a", "1", "--b"], "--b"),
        (["--a", "--b", "1"], "--a"),
        (["a", "1"], "a"),
        (["--a", "1", "2"], "2"),
        (["--a", "1", "--a", "2"], "--a"),
    ],
)
def test_flags_without_one_value_each_are_refused(words: list[str], at: str) -> None:
    with pytest.raises(InvalidArgument, match=f"at '{at}': expected each flag once, followed by one value"):
        launch._convert_nargs_to_dict(words)


def ranks(*args: Any) -> tuple[Any, ...]:
    return (*args, *(os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")))


@pytest.mark.parametrize(
    ("kind", "rank", "local_rank"),
    [
        ("NO", None, None),
        ("XLA", None, None),
        ("MULTI_GPU", "5", "1"),
        ("MULTI_CPU", "5", "1"),
        ("FSDP", None, None),
    ],
)
def test_each_process_is_told_its_rank_while_the_function_runs(
    monkeypatch: pytest.MonkeyPatch, kind: str, rank: str | None, local_rank: str | None
) -> None:
    for name in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("NPROC", "4")
    seen: list[tuple[Any, ...]] = []
    launch.PrepareForLaunch(lambda *args: seen.append(ranks(*args)), kind)(1, "x", 2)
    assert seen == [("x", 2, rank, local_rank, "true")]
    assert ranks() == (None, None, None)


def _train(folder: str) -> None:
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0])).item()
    Path(folder, str(accelerator.process_index)).write_text(f"{accelerator.num_processes} {total}")


@pytest.mark.parametrize("debug", [False, True])
def test_processes_that_torch_starts_train_together(tmp_path: Path, debug: bool) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # forks would have what tests before have left
    results = tmp_path / "results"
    results.mkdir()
    told: dict[str, object] = {"WORLD_SIZE": 2}
    if debug:
        told["ACCELERATE_DEBUG_RDV_FILE"] = tmp_path / "rendezvous"
    else:
        told |= {"LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": host_resources.free_port()}
    with patch_environment(**told):
        prepared = launch.PrepareForLaunch(_train, "MULTI_CPU", debug=debug)
        torch.multiprocessing.start_processes(prepared, args=(str(results),), nprocs=2, start_method="fork")
    assert {path.name: path.read_text() for path in results.iterdir()} == {"0": "2 3.0", "1": "2 3.0"}


def test_the_file_to_meet_at_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_DEBUG_RDV_FILE", raising=False)
    with pytest.raises(InvalidArgument, match="ACCELERATE_DEBUG_RDV_FILE and WORLD_SIZE"):
        launch.PrepareForLaunch(_train, debug=True)(0, "nowhere")


@pytest.mark.parametrize(
    "name",
    [
        "PrepareForLaunch",
        "_convert_nargs_to_dict",
        "prepare_deepspeed_cmd_env",
        "prepare_sagemager_args_inputs",
        "prepare_tpu",
        "prepare_multi_gpu_env",
        "prepare_simple_launcher_cmd_env",
    ],
)
def test_signatures_are_the_originals(name: str) -> None:
    def shape(module: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    assert shape(launch) == shape(original)


def test_arguments_of_one_parser_are_those_that_it_knows() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=1)
    parser.add_argument("--name", default="x")
    args = argparse.Namespace(port=5, other=3)
    expected = original._filter_args(args, parser, ["--name", "y", "--more"])
    assert (
        launch._filter_args(args, parser, ["--name", "y", "--more"]) == expected == argparse.Namespace(port=5, name="y")
    )
