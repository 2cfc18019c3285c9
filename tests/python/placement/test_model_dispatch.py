"""Where offloaded weights come from, and what a dispatched model shares."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement import model_dispatch as dispatching
from accelerate_cpp.placement.model_dispatch import Dispatch, move, values_of, write_missing
from accelerate_cpp.placement.module_hooks import MoveGuard
from accelerate_cpp.placement.offload import OffloadedWeightsLoader, offload_state_dict


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def half_empty() -> nn.Sequential:
    module = model()
    module[0].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    return module


def test_values_are_those_of_the_model_itself() -> None:
    module = model()
    values = values_of(module, "advice")
    assert list(values) == list(module.state_dict())
    assert values["0.weight"] is module[0].weight
    assert list(values_of(half_empty(), "advice", ["1.bias", "0.bias"])) == ["0.bias", "1.bias"]
    with pytest.raises(InvalidArgument, match=r"no values of 0\.weight, which should be on the CPU; advice"):
        values_of(half_empty(), "advice")


def test_a_folder_gets_what_it_lacks_and_keeps_what_it_has(tmp_path: Path) -> None:
    first, second = model(), model()
    offload_state_dict(tmp_path, {"0.weight": first[0].weight})
    write_missing(second.state_dict(), tmp_path)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert torch.equal(loader["0.weight"], first[0].weight)
    assert torch.equal(loader["0.bias"], second[0].bias)
    write_missing(half_empty().state_dict(), tmp_path)


def test_what_is_neither_in_the_model_nor_in_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no values of 0\.weight, neither in the model nor in"):
        write_missing(half_empty().state_dict(), tmp_path)


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"0.weight": torch.ones(3)})
    with pytest.raises(
        InvalidArgument, match=r"weights of another model \(0\.weight has \(2, 2\), in the folder \(3,\)"
    ):
        write_missing(model().state_dict(), tmp_path)


def test_a_model_without_values_cannot_be_moved() -> None:
    with pytest.raises(InvalidArgument, match=r"no values of 0\.weight to put on cpu: load a checkpoint before"):
        move(half_empty(), torch.device("cpu"))
    module = half_empty()
    move(module, torch.device("meta"))
    assert module[1].weight.device.type == "meta"


def test_without_a_folder_nothing_goes_to_the_disk() -> None:
    with pytest.raises(InvalidArgument, match="device_map puts 0 on the disk: pass an offload_dir"):
        Dispatch(model(), {"0": "disk", "1": "cpu"}, None).find_weights(None, None, None)


def test_devices_that_are_not_there_are_refused() -> None:
    for devices, main in (({"0": 99, "1": "cpu"}, None), ({"": "cpu"}, 99)):
        with pytest.raises(InvalidArgument, match="device 99"):
            Dispatch(model(), devices, main)


def attached(module: nn.Module, devices: dict[str, Any], main: Any, state_dict: Any, folder: Any) -> nn.Module:
    dispatch = Dispatch(module, devices, main)
    dispatch.find_weights(state_dict, folder, None)
    dispatch.attach(False, None, None)
    return module


def test_what_is_on_the_cpu_runs_on_another_main_device() -> None:
    module = attached(model(), {"0": "cpu", "1": "meta"}, None, None, None)
    assert module[0]._hf_hook.offload
    assert str(module[0]._hf_hook.execution_device) == "meta"
    assert not module[1]._hf_hook.offload
    assert isinstance(module.to, MoveGuard)


def test_weights_for_the_cpu_can_be_given() -> None:
    weights = {"0.weight": torch.full((2, 2), 5.0), "0.bias": torch.zeros(2)}
    module = attached(half_empty(), {"0": "cpu", "1": "meta"}, None, weights, None)
    assert torch.equal(module[0]._hf_hook.weights_map["weight"], weights["0.weight"])


def tied() -> nn.ModuleDict:
    module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abcd"})
    for name in "bcd":
        module[name].weight = module["a"].weight
    return module


def test_shared_weights_are_shared_on_each_device(tmp_path: Path) -> None:
    module = attached(tied(), {"a": "meta", "b": "disk", "c": "cpu", "d": "meta"}, "cpu", None, tmp_path)
    assert module["a"].weight is module["d"].weight
    assert module["c"].weight.device.type == "cpu"
    copies = module["a"]._hf_hook.tied_params_map
    assert copies in ({}, None)


def test_of_shared_weights_that_are_kept_on_the_cpu_the_address_stays_known() -> None:
    module = attached(tied(), {"a": "cpu", "b": "meta", "c": "meta", "d": "cpu"}, "meta", None, None)
    weights = module["a"]._hf_hook.weights_map["weight"]
    assert weights.data_ptr() == module["d"]._hf_hook.weights_map["weight"].data_ptr()


def test_what_is_offloaded_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=dispatching.__name__):
        attached(model(), {"0": "disk", "1": "cpu"}, None, None, tmp_path)
    assert "offloaded between forward passes: 0" in caplog.text
