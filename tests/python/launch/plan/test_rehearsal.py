"""Rehearsals: fewer processes, on the CPUs of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_cpp.launch.plan.launch_plan import LaunchOptions
from accelerate_cpp.launch.plan.rehearsal import rehearse


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("content", "flag", "expected"),
    [
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", None, (2, 8)),
        ("distributed_type: MULTI_GPU\nnum_processes: 8\n", 3, (3, 3)),
        ("distributed_type: MULTI_GPU\nnum_machines: 4\nnum_processes: 8\nmain_process_ip: a\n", None, (2, 8)),
        ("distributed_type: MULTI_GPU\n", None, (2, 2)),
        ("distributed_type: 'NO'\n", None, (1, 1)),
    ],
)
def test_it_has_two_processes_on_the_cpu_unless_a_flag_says_how_many(
    tmp_path: Path, script: str, content: str, flag: int | None, expected: tuple[int, int]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    rehearsal = rehearse(LaunchOptions(script, config_file=str(file), num_processes=flag), {})
    assert (rehearsal.plan.group.num_processes, rehearsal.configured) == expected
    assert rehearsal.plan.group.cpu
    assert rehearsal.plan.group.launchers.count == 1


def test_more_processes_than_cores_are_a_crowd(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert rehearse(LaunchOptions(script, cpu=True, num_processes=2), {"HF_HOME": "/nowhere"}).crowd() == ""
    crowded = rehearse(LaunchOptions(script, cpu=True, num_processes=3), {"HF_HOME": "/nowhere"})
    assert crowded.crowd() == "3 processes (--num_processes) on 2 cores of each machine like this"


def test_more_processes_than_gpus_are_a_crowd(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate_cpp.launch.plan.host_resources.gpu_count", lambda *_: 2)
    crowded = rehearse(LaunchOptions(script, multi_gpu=True, num_processes=3), {"HF_HOME": "/nowhere"})
    assert crowded.crowd() == "3 processes (--num_processes) on 2 GPUs of each machine like this"


def test_a_launch_on_tpus_is_rehearsed_on_the_cpu(script: str) -> None:
    rehearsal = rehearse(LaunchOptions(script, tpu=True, downcast_bf16=True), {"HF_HOME": "/nowhere"})
    assert rehearsal.plan.tpus is None
    assert (rehearsal.plan.group.cpu, rehearsal.plan.group.downcast_bf16) == (True, False)


@pytest.mark.parametrize(
    ("content", "environ", "expected"),
    [
        ("distributed_type: FSDP\nparallelism_config: {tp_size: 4, dp_shard_size: 2}\n", {}, 8),
        (
            "distributed_type: FSDP\nparallelism_config: {dp_shard_size: 2}\n",
            {"PARALLELISM_CONFIG_TP_SIZE": "2"},
            4,
        ),
        (
            "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2, megatron_lm_pp_degree: 2}\n",
            {},
            4,
        ),
        ("distributed_type: MULTI_CPU\nparallelism_config: {}\n", {}, 2),
    ],
)
def test_it_has_as_many_processes_as_the_mesh(
    tmp_path: Path, script: str, content: str, environ: dict[str, str], expected: int
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"num_processes: 8\n{content}")
    rehearsal = rehearse(LaunchOptions(script, config_file=str(file)), environ)
    assert (rehearsal.plan.group.num_processes, rehearsal.configured) == (expected, 8)
    two = rehearse(LaunchOptions(script, config_file=str(file), num_processes=2), environ)
    assert two.plan.group.num_processes == 2


def test_a_mesh_for_a_cluster_is_not_started_on_one_machine(script: str) -> None:
    environ = {"HF_HOME": "/nowhere", "ACCELERATE_USE_PARALLELISM_CONFIG": "1", "PARALLELISM_CONFIG_TP_SIZE": "64"}
    with pytest.raises(ValueError, match="the mesh needs 64 processes, and a check starts 16 at most"):
        rehearse(LaunchOptions(script), environ)
