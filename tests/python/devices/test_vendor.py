"""A device that is no part of torch, brought as a vendor brings it, trains as the CPU does, alone and in processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vendor
from safetensors.torch import load_file

PROGRAM = Path(__file__).with_name("train_on_any_device.py")


def run(command: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """The reports of all processes, by rank."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    warned = [line for line in done.stderr.splitlines() if "Warning" in line and "Time stats are" not in line]
    assert not warned, done.stderr
    reports = sorted(re.findall(r"REPORT (\d+) (\{.*\})", done.stdout))
    return [json.loads(text) for _, text in reports]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not (vendor.LIBRARIES / "libdevice_double.so").is_file():
        pytest.skip("the device double of the core's tests is not built")
    return vendor.install(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [pytest.param(*one, marks=pytest.mark.long) for one in [("no", 1e-6), ("bf16", 5e-2), ("fp16", 5e-3)]],
)
def test_it_trains_as_the_cpu_does(
    precision: str, tolerance: float, environment: dict[str, str], tmp_path: Path
) -> None:
    """Without mixed precision to the last bit but for sums of norms: it computes with the same functions."""
    program = [sys.executable, str(PROGRAM), precision]
    (there,) = run([*program, str(tmp_path / "there"), "64"], environment)
    (here,) = run([*program, str(tmp_path / "here"), "64"], environment | {"ACCELERATE_USE_CPU": "true"})
    assert (there["device"], there["parameters"], there["type"]) == ("standin:0", ["standin:0"], "NO")
    assert here["device"] == "cpu"
    # What autocast computes in is cast back at the end of the forward pass.
    assert there["computes_in"] == here["computes_in"] == "torch.float32"
    for part in ("first", "after", "again"):
        assert there[part] == pytest.approx(here[part], rel=tolerance, abs=tolerance)
    assert there["again"] == there["after"]  # weights, optimizer and generators are those of the checkpoint
    assert there["again"][-2] < 0.6 * there["first"][0]
    weights = [load_file(tmp_path / folder / "model.safetensors") for folder in ("there", "here")]
    for name, value in weights[0].items():
        assert value.numpy() == pytest.approx(weights[1][name].numpy(), abs=1e-5 if precision == "no" else 0.05)


def test_processes_train_over_its_own_collectives(environment: dict[str, str], tmp_path: Path) -> None:
    launch = [str(Path(sys.executable).with_name("accelerate-cpp")), "launch", "--num_processes", "2", str(PROGRAM)]
    ranks = run([*launch, "no", str(tmp_path / "two"), "64"], environment)
    assert [(rank["device"], rank["parameters"]) for rank in ranks] == [
        ("standin:0", ["standin:0"]),
        ("standin:1", ["standin:1"]),
    ]
    assert {(rank["type"], rank["backend"]) for rank in ranks} == {("MULTI_GPU", "standin_collectives")}
    assert [rank["gathered"] for rank in ranks] == [[0, 1], [0, 1]]
    (whole,) = run(
        [sys.executable, str(PROGRAM), "no", str(tmp_path / "one"), "128"], environment | {"ACCELERATE_USE_CPU": "true"}
    )
    for rank in ranks:
        for part in ("first", "after", "again"):
            assert rank[part] == pytest.approx(whole[part], rel=1e-4)


def test_the_users_own_device_and_the_cpu_are_chosen_as_ever(environment: dict[str, str]) -> None:
    program = """
import torch
from accelerate_cpp import Accelerator
from accelerate_cpp.devices.memory import clear_device_cache, release_cache
from accelerate_cpp.utils import get_max_memory
accelerator = Accelerator()
clear_device_cache()
release_cache(accelerator.device)
print(accelerator.device, torch.standin.current_device(), [key for key in get_max_memory()])
"""
    command = [sys.executable, "-c", program]
    for asked, expected in [("standin:1", "standin:1 1 [0, 1, 'cpu']"), ("cpu", "cpu 0 [0, 1, 'cpu']")]:
        chosen = environment | {"ACCELERATE_TORCH_DEVICE": asked}
        done = subprocess.run(command, env=chosen, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected
    absent = subprocess.run(
        command, env=environment | {"ACCELERATE_TORCH_DEVICE": "standin:2"}, capture_output=True, text=True
    )
    assert "device 'standin:2' is not present; this process sees cpu, 2 x standin" in absent.stderr
