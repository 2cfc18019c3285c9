from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.dry_run import render
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, LaunchPlan, remarks, resolve
from accelerate_cpp.launch.plan.tpus import Pod, TpuLaunch, remarks_on_tpus, tpu_launch

POD = "tpu_name: pod\ntpu_zone: here-1\ntpu_use_cluster: true\ntpu_use_sudo: true\ntpu_env:\n- A=1\n"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("def main(): pass\n")
    return str(path)


def planned(script: str, file: str | None = None, **said: object) -> LaunchPlan:
    if file is not None:
        (Path(script).parent / "c.yaml").write_text(f"distributed_type: XLA\n{file}")
        said["config_file"] = str(Path(script).parent / "c.yaml")
    return resolve(LaunchOptions(script, ("--epochs", "2"), **said), {"HF_HOME": str(Path(script).parent)})  # type: ignore[arg-type]


def test_a_flag_or_a_file_asks_for_tpus_and_names_the_function(script: str) -> None:
    expected = TpuLaunch(script, ("--epochs", "2"), "train")
    assert planned(script, tpu=True, main_training_function="train").tpus == expected
    assert planned(script, "main_training_function: train\n").tpus == expected
    assert planned(script).tpus is None
    assert planned(script, "main_training_function: train\n", cpu=True).tpus is None


def test_a_flag_for_other_devices_takes_precedence_over_the_file(script: str) -> None:
    for flag in ("cpu", "multi_gpu"):
        plan = planned(script, "num_processes: 2\n", **{flag: True})
        assert plan.tpus is None
        assert not plan.settings["tpu"].value


def test_a_dry_run_says_who_starts_the_workers_and_what_they_call(script: str) -> None:
    lines = render(planned(script, "num_processes: 8\nmain_training_function: train\n")).splitlines()
    assert lines[0] == "one process for each TPU on this machine, by torch_xla, which calls train() of:"
    assert lines[1].endswith(f"{script} --epochs 2")
    assert not [line for line in lines if line.startswith(("  RANK=", "  WORLD_SIZE="))]
    assert "  ACCELERATE_USE_CPU=False" in lines
    assert render(planned(script, tpu=True, num_processes=1)).startswith("one process on this machine, by torch_xla")


def test_one_process_is_started_only_if_the_flag_says_one(script: str) -> None:
    assert planned(script, tpu=True, num_processes=1).tpus == TpuLaunch(script, ("--epochs", "2"), "main", alone=True)
    several = planned(script, "num_processes: 1\n").tpus
    assert several is not None
    assert not several.alone


def test_a_file_names_the_pod_and_a_flag_keeps_the_launch_here(script: str) -> None:
    there = planned(script, POD).tpus
    assert there is not None
    assert there.pod == Pod("pod", "here-1", ("A=1",), as_root=True)
    here = planned(script, POD, tpu_use_cluster=False).tpus
    assert here is not None
    assert here.pod is None


def test_workers_are_told_to_store_floats_in_bf16(script: str) -> None:
    assert planned(script, "downcast_bf16: 'yes'\nmixed_precision: bf16\n").group.downcast_bf16
    assert planned(script, tpu=True, downcast_bf16=True).group.downcast_bf16
    assert not planned(script, tpu=True).group.downcast_bf16


def test_flags_for_workers_of_this_launcher_are_said_to_do_nothing(script: str) -> None:
    options = LaunchOptions(script, tpu=True, log_dir="logs", num_processes=4)
    told = list(remarks(resolve(options, {"HF_HOME": str(Path(script).parent)}), options))
    assert [text.partition(":")[0] for text in told] == ["--log_dir", "--num_processes"]
    assert list(remarks_on_tpus(None, options)) == []


def test_what_torch_xla_does_not_start_is_refused(script: str) -> None:
    with pytest.raises(InvalidArgument, match=r"2 machines .*pass --tpu_cluster"):
        planned(script, tpu=True, num_machines=2, main_process_ip="10.0.0.1", num_processes=2)
    plan = planned(script, tpu=True)
    with pytest.raises(InvalidArgument, match="--no_python"):
        tpu_launch(LaunchOptions(script, tpu=True, no_python=True), plan.settings, plan.group)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"tpu_env": ["A=1", "s3cr3t"]}, r"variable 2 for .* \(--env\): .* found a text without \"=\": correct it"),
        ({"tpu_env": ["A-B=s3cr3t"]}, r"variable 1 for .* \(--env\): .* found the name 'A-B': correct it"),
        ({}, r"variable 1 for .* \(.*c.yaml: tpu_env\): .* found the name '1'"),
    ],
)
def test_a_variable_for_a_pod_that_is_none_is_refused_without_its_text(
    script: str, said: dict[str, list[str]], words: str
) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        planned(script, POD.replace("A=1", "1=s3cr3t"), **said)
    assert "s3cr3t" not in str(refused.value)
