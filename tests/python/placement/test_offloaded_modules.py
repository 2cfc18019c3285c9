"""Looking at modules whose weights are offloaded."""

from __future__ import annotations

from pathlib import Path

import accelerate.utils.modeling as original
import pytest
import torch
from torch import nn

from accelerate_cpp.errors import CheckpointError, InvalidArgument
from accelerate_cpp.hooks import AlignDevicesHook, ModelHook, add_hook_to_module, attach_align_device_hook
from accelerate_cpp.placement.offload import offload_state_dict, read_offload_index
from accelerate_cpp.placement.offloaded_modules import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    load_offloaded_weights,
    offload_hook,
)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))


def offloaded() -> tuple[nn.Sequential, dict[str, torch.Tensor]]:
    module = model()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attach_align_device_hook(module, "cpu", offload=True, weights_map=state)
    return module, state


def test_a_hook_that_offloads_is_found_among_others() -> None:
    module, hook = nn.Linear(1, 1), AlignDevicesHook("cpu", offload=True)
    assert not has_offloaded_params(module)
    add_hook_to_module(module, AlignDevicesHook("cpu"))
    assert offload_hook(module) is None
    add_hook_to_module(module, hook, append=True)
    add_hook_to_module(module, ModelHook(), append=True)
    assert offload_hook(module) is hook
    assert has_offloaded_params(module)


def test_offloaded_weights_are_there_for_a_while() -> None:
    module, state = offloaded()
    with align_module_device(module[0]):
        assert torch.equal(module[0].weight, state["0.weight"])
    with align_module_device(module[0], "meta"):
        assert module[0]._hf_hook.execution_device == "meta"
    assert module[0].weight.device.type == "meta"
    assert module[0]._hf_hook.execution_device == "cpu"


def test_after_an_error_they_are_away_again() -> None:
    module, _ = offloaded()
    with pytest.raises(KeyError), align_module_device(module[0]):
        raise KeyError
    assert module[0].weight.device.type == "meta"


def test_other_weights_are_moved_there_and_back() -> None:
    module = nn.Linear(2, 2)
    weight, expected = module.weight, module.weight.detach() + 1
    with align_module_device(module, "meta"):
        assert module.weight.device.type == "meta"
    assert module.weight is weight
    with align_module_device(module, "cpu"):
        module.weight.data += 1
    with align_module_device(module):
        pass
    assert torch.equal(module.weight, expected)


def test_a_state_dict_is_filled_as_by_the_original() -> None:
    module, state = offloaded()
    plain = nn.Linear(2, 2)
    for name, found in (("x.weight", plain), ("x", plain)):
        empty = {"x.weight": "", "x.bias": ""}
        expected = original.get_state_dict_from_offload(found, name, dict(empty))
        result = get_state_dict_from_offload(found, name, dict(empty))
        assert [(key, str(value)) for key, value in result.items()] == [
            (key, str(value)) for key, value in expected.items()
        ]
    filled = get_state_dict_from_offload(module[0], "0.weight", {"0.weight": None, "1.weight": None})
    assert filled["1.weight"] is None
    assert torch.equal(filled["0.weight"], state["0.weight"])


def test_the_state_dict_of_an_offloaded_model_has_all_values(caplog: pytest.LogCaptureFixture) -> None:
    module, state = offloaded()
    found = get_state_dict_offloaded_model(module)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in state.items()
    }
    assert found["0.weight"].data_ptr() == state["0.weight"].data_ptr()
    module[1].weight = nn.Parameter(torch.empty(2, device="meta"))
    del state["1.weight"]
    assert set(get_state_dict_offloaded_model(module)) == set(state)
    assert "no values: 1.weight" in caplog.text


def test_offloaded_weights_of_submodules_are_in_the_state_dict() -> None:
    module = nn.MultiheadAttention(2, 1)
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    attach_align_device_hook(module, "cpu", offload=True)
    found = get_state_dict_offloaded_model(module)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_weights_of_a_folder_are_loaded_by_an_index(tmp_path: Path) -> None:
    module, other = model(), model()
    offload_state_dict(tmp_path, other.state_dict())
    index = read_offload_index(tmp_path)
    load_offloaded_weights(module, None, tmp_path)
    load_offloaded_weights(module, {"0.weight": index["0.weight"]}, tmp_path)
    assert torch.equal(module[0].weight, other[0].weight)
    assert not torch.equal(module[2][0].weight, other[2][0].weight)
    (tmp_path / "0.weight.dat").rename(tmp_path / "7.weight.dat")
    with pytest.raises(InvalidArgument, match="no module '7'"):
        load_offloaded_weights(module, {"7.weight": index["0.weight"]}, tmp_path)
    with pytest.raises(CheckpointError, match=r"0\.weight\.dat is missing"):
        load_offloaded_weights(module, index, tmp_path)
