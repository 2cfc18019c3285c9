"""Training through the real torch_xla; what is expected comes from the same run on the CPU without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

Run = Any


def _agree(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-4) -> None:
    assert found["ends"] == expected["ends"]
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=tolerance, atol=tolerance)
    assert found["state"].keys() == expected["state"].keys()
    torch.testing.assert_close(found["state"], expected["state"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "options", [{}, {"steps_each": 3, "max_norm": 0.1}, {"max_norm": 0.05}], ids=["plain", "accumulated", "clipped"]
)
def test_one_device_trains_as_the_cpu(run: Run, options: dict[str, Any]) -> None:
    found, expected = run("train", options), run("train", {**options, "cpu": True})
    assert (found["devices"], found["type"], found["processes"]) == ({"xla"}, "XLA", 1)
    assert expected["devices"] == {"cpu"}
    assert found["ends"][7] == (26, True)  # 250 samples
    assert found["tied"]
    assert found["losses"][-1] < 0.5 * found["losses"][0] or "max_norm" in options
    _agree(found, expected)


@pytest.mark.parametrize("plugin", [False, True], ids=["whole", "shared_out"])
def test_two_devices_of_one_process_train_as_the_cpu(run: Run, plugin: bool) -> None:
    options = {"spmd": True, "plugin": plugin, "max_norm": 0.5}
    found, expected = run("train", options, devices=2), run("train", {"cpu": True, "max_norm": 0.5})
    assert (found["type"], found["processes"]) == ("XLA", 1)
    assert ("devices=[2,1]" in found["sharding"]) is plugin
    assert found["tied"]
    _agree(found, expected)


def test_bf16_computes_in_bf16_and_keeps_parameters(run: Run) -> None:
    found, expected = run("train", {"precision": "bf16"}), run("train", {"cpu": True, "precision": "bf16"})
    assert found["state"]["first.weight"].dtype is torch.float32
    assert found["dtype"] == "torch.float32"  # outputs are converted back
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=0.05, atol=0.05)
    exact = run("train", {"cpu": True})
    assert found["losses"] != pytest.approx(exact["losses"], abs=1e-5)


@pytest.mark.parametrize(("devices", "plugin"), [(1, False), (2, True)], ids=["one", "shared_out"])
def test_a_state_continues_where_it_was_saved(run: Run, tmp_path: Path, devices: int, plugin: bool) -> None:
    options = {"folder": str(tmp_path / "state"), "spmd": plugin, "plugin": plugin}
    whole = run("train", options, devices=devices)
    rest = run("train", {**options, "loads": True}, devices=devices)
    torch.testing.assert_close(rest["losses"], whole["losses"][8:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rest["state"], whole["state"], rtol=1e-5, atol=1e-6)


def test_files_are_those_of_a_run_on_the_cpu(run: Run, tmp_path: Path) -> None:
    run("train", {"folder": str(tmp_path / "xla")})
    run("train", {"folder": str(tmp_path / "cpu"), "cpu": True}, USE_TORCH_XLA="0")
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("xla", "cpu")]
    assert files[0] == files[1]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("xla", "cpu")]
    assert list(weights[0]) == list(weights[1])
    assert "second.weight" not in weights[0]  # tied
    torch.testing.assert_close(*weights, rtol=2e-4, atol=2e-4)
    states = [torch.load(tmp_path / name / "optimizer.bin") for name in ("xla", "cpu")]  # without torch_xla
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=2e-4, atol=2e-4)
    random = torch.load(tmp_path / "xla" / "random_states_0.pkl", weights_only=False)
    assert isinstance(random["xm_seed"], int)


def test_an_error_of_a_dataset_reaches_the_loop(run: Run) -> None:
    assert run("rows_that_fail") == "1 sample 5 is unreadable"


def test_loops_may_be_left_and_begun_later(run: Run) -> None:
    assert run("left_early") == (3, 5, True)


def test_random_numbers_of_the_device_come_back(run: Run, tmp_path: Path) -> None:
    assert run("seeds", str(tmp_path / "state")) == (True, True)


def test_floats_are_stored_in_bf16_if_asked_for(run: Run) -> None:
    assert run("downcast", ACCELERATE_DOWNCAST_BF16="1") == (1.0, True, "1")


def test_what_cannot_be_had_is_said(run: Run) -> None:
    fp16, sharded = run("refusals")
    assert "mixed_precision='fp16': TPU (xla:0) does not support fp16; use 'bf16' or 'no'" in fp16
    assert "call torch_xla.runtime.use_spmd() at the start" in sharded


def test_one_process_is_a_run_of_its_own(run: Run) -> None:
    assert run("one_collective") == [[1.0, 2.0], [1.0, 2.0], "CPU", 1, 0, True, True, True]


def test_a_model_in_torch_xlas_first_fsdp_is_taken_as_it_is(run: Run) -> None:
    names, norm, moved = run("already_sharded")
    assert names == ["Linear"]
    assert norm == pytest.approx(2.0)  # of four gradients that are 1
    assert moved


def test_processes_that_are_threads_are_refused(run: Run) -> None:
    """torch_xla runs a thread for each device of a CPU; its launcher then calls the function once in each."""
    with pytest.raises(AssertionError, match="runs 2 of its 2 processes as threads of this one"):
        run("spawned", devices=2)
