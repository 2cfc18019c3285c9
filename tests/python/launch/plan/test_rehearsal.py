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
