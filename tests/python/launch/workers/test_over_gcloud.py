from __future__ import annotations

import os
import shlex

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.tpus import Pod
from accelerate_cpp.launch.workers.over_gcloud import launch_on_each, on_all_machines, require_gcloud

SSH = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "here-1", "--command"]


def test_commands_run_on_all_machines() -> None:
    assert on_all_machines("pod", "here-1", "ls") == [*SSH, "ls", "--worker", "all"]
    assert on_all_machines("pod", "here-1", "ls", alpha=True)[:2] == ["gcloud", "alpha"]


def test_each_machine_gets_the_launch_without_what_concerns_the_pod() -> None:
    flags = ["--tpu_cluster", "--tpu_name", "pod", "--tpu-zone=here-1", "--env", "A=b c", "--mixed_precision", "bf16"]
    command = launch_on_each(Pod("pod", "here-1", ("A=b c",)), flags, ["train.py", "--epochs", "2"])
    assert command[: len(SSH)] == SSH
    assert command[-2:] == ["--worker", "all"]
    words = shlex.split(command[len(SSH)])
    assert words[:3] == ["cd", os.getcwd(), "&&"]
    assert words[3:] == [
        *("env", "ACCELERATE_IN_TPU_POD=1", "A=b c", "accelerate-cpp", "launch", "--tpu", "--mixed_precision", "bf16"),
        *("--no_tpu_cluster", "--num_machines", "1", "train.py", "--epochs", "2"),
    ]


def test_launches_may_run_as_root() -> None:
    command = launch_on_each(Pod("pod", "here-1", as_root=True), ["--tpu"], ["train.py"])
    assert " && sudo env ACCELERATE_IN_TPU_POD=1 accelerate-cpp launch --tpu " in command[len(SSH)]


def test_a_missing_gcloud_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InvalidArgument, match=r"launch --tpu_cluster: there is no gcloud in PATH.*--dry_run"):
        require_gcloud("launch --tpu_cluster")
