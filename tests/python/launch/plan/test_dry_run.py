from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_cpp.launch.plan.dry_run import render
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, resolve


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


def test_one_machine(script: str, tmp_path: Path) -> None:
    options = LaunchOptions(script, ("--lr", "1 e"), cpu=True, num_processes=2, max_restarts=3, log_dir=str(tmp_path))
    lines = render(resolve(options, {})).splitlines()
    assert lines[0] == "2 processes on this machine"
    assert lines[1].endswith(f"{script} --lr '1 e'")
    assert "  WORLD_SIZE=2" in lines
    assert "cpu: True (--cpu)" in lines
    assert "restarts after a failure: 3" in lines
    assert any(line.startswith(f"output also in {tmp_path}") for line in lines)


def test_what_may_be_a_secret_is_not_shown(script: str, tmp_path: Path) -> None:
    file = tmp_path / "tpu.yaml"
    file.write_text("distributed_type: XLA\ntpu_env: [HF_TOKEN=s3cr3t, XLA_USE_F16=1]\ncommands: [login s3cr3t]\n")
    text = render(resolve(LaunchOptions(script, config_file=str(file)), {}))
    assert "tpu_env: ['HF_TOKEN=…', 'XLA_USE_F16=1']" in text
    assert "s3cr3t" not in text


def test_one_of_two_machines(script: str) -> None:
    options = LaunchOptions(script, cpu=True, num_processes=4, num_machines=2, machine_rank=1, main_process_ip="head")
    lines = render(resolve(options, {})).splitlines()
    assert lines[:2] == ["launcher 1 of 2 (--num_machines): rank 2 to 3 of 4", "rank 0 is at head, port 29500"]


def test_agent(script: str) -> None:
    options = LaunchOptions(script, cpu=True, num_machines=2, main_process_ip="head", rdzv_backend="c10d")
    text = render(resolve(options, {}))
    assert "watched by torch's agent, which meets the others through c10d:" in text
    assert "--rdzv_endpoint=head:29500" in text
