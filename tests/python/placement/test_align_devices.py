"""The hook that brings inputs and weights to one device. The meta device stands for one that is not the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.align_devices import AlignDevicesHook
from accelerate_cpp.placement.module_hooks import add_hook_to_module, remove_hook_from_module
from accelerate_cpp.placement.offload import OffloadedWeightsLoader, offload_state_dict


def devices(module: nn.Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.device.type for name, tensor in tensors}


def norm() -> nn.BatchNorm1d:
    module = nn.BatchNorm1d(2).eval()
    module.register_buffer("other", torch.ones(2), persistent=False)
    return module


X = torch.tensor([[1.0, 2.0]])


def test_weights_are_moved_for_good_without_offloading() -> None:
    module = nn.Sequential(norm())
    add_hook_to_module(module, AlignDevicesHook("meta"))
    assert set(devices(module).values()) == {"cpu"}
    add_hook_to_module(module, AlignDevicesHook("meta", place_submodules=True))
    assert set(devices(module).values()) == {"meta"}
    remove_hook_from_module(module)
    assert set(devices(module).values()) == {"meta"}


def test_offloaded_weights_are_there_for_the_forward_pass_only() -> None:
    module = norm()
    before, parameters = module(X), dict(module.named_parameters())
    hook = AlignDevicesHook("cpu", offload=True)
    add_hook_to_module(module, hook)
    away = devices(module)
    assert {name for name, device in away.items() if device == "meta"} == {"weight", "bias"}
    assert torch.equal(module(X), before)
    assert devices(module) == away
    assert hook.original_devices == dict.fromkeys(["weight", "bias"], torch.device("cpu"))
    remove_hook_from_module(module)
    assert all(module.get_parameter(name) is parameter for name, parameter in parameters.items())


def test_buffers_are_offloaded_if_asked_for_but_for_those_that_are_not_saved() -> None:
    module = norm()
    before = module(X)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, offload_buffers=True))
    assert [name for name, device in devices(module).items() if device == "cpu"] == ["other"]
    assert torch.equal(module(X), before)
    remove_hook_from_module(module)
    assert set(devices(module).values()) == {"cpu"}


def test_weights_of_submodules_come_along_if_asked_for(tmp_path: Path) -> None:
    attention = nn.MultiheadAttention(2, 1).eval()
    x = torch.ones(3, 2)
    before = attention(x, x, x)[0]
    offload_state_dict(tmp_path, attention.state_dict())
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    add_hook_to_module(attention, AlignDevicesHook("cpu", offload=True, weights_map=weights, place_submodules=True))
    assert set(devices(attention).values()) == {"meta"}
    assert torch.equal(attention(x, x, x)[0], before)


def test_weights_that_the_map_lacks_stay() -> None:
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map={"weight": module.weight}))
    assert devices(module) == {"weight": "meta", "bias": "cpu"}
    assert module(X).shape == (1, 2)


def test_weights_that_had_no_values_are_on_the_cpu_without_the_hook() -> None:
    module = nn.Linear(2, 2, device="meta")
    weights = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True, weights_map=weights))
    assert module(X).tolist() == [[3, 3]]
    remove_hook_from_module(module)
    assert (devices(module), module(X).tolist()) == ({"weight": "cpu", "bias": "cpu"}, [[3, 3]])


def test_inputs_are_brought_and_outputs_brought_back() -> None:
    class Echo(nn.Module):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> tuple[Any, ...]:
            return x, kwargs

    for io_same_device, expected in ((False, "meta"), (True, "cpu")):
        hook = AlignDevicesHook("meta", io_same_device=io_same_device, skip_keys="stays")
        module = add_hook_to_module(Echo(), hook)
        if io_same_device:
            with pytest.raises(NotImplementedError):  # what is on the meta device has no values to bring back
                module(torch.ones(1))
            assert hook.input_device == torch.device("cpu")
            continue
        x, kwargs = module(torch.ones(1), moves=torch.ones(1), stays=torch.ones(1))
        assert (x.device.type, kwargs["moves"].device.type, kwargs["stays"].device.type) == (expected, expected, "cpu")


def test_without_a_device_inputs_stay_where_they_are() -> None:
    module = add_hook_to_module(nn.Identity(), AlignDevicesHook())
    assert module(X) is X


def test_after_a_forward_that_failed_weights_are_away_again() -> None:
    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 5))
    assert set(devices(module).values()) == {"meta"}
    assert module(X).shape == (1, 2)


def test_inputs_that_cannot_be_moved_take_the_weights_away_again() -> None:
    class Stuck:
        def to(self, _device: Any, **_options: Any) -> None:
            raise RuntimeError("stuck")

    module = nn.Linear(2, 2)
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    with pytest.raises(RuntimeError, match="stuck"):
        module(Stuck())
    assert set(devices(module).values()) == {"meta"}


def test_a_module_may_run_within_itself() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, depth: int) -> torch.Tensor:
            return self.weight + (self(depth - 1) if depth else 0) + self.weight

    module = add_hook_to_module(Nested(), AlignDevicesHook("cpu", offload=True))
    assert module(2).item() == 6
    assert module.weight.device.type == "meta"


def test_gradients_reach_the_weights_that_are_kept() -> None:
    module = nn.Linear(2, 2)
    weight = module.weight
    add_hook_to_module(module, AlignDevicesHook("cpu", offload=True))
    module(X).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1, 2], [1, 2]]


def test_a_copy_has_weights_of_its_own() -> None:
    module = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
    before, copied = module(X), copy.deepcopy(module)
    copied._hf_hook.weights_map["weight"].data.zero_()
    assert torch.equal(module(X), before)
    assert not torch.equal(copied(X), before)


def test_shared_weights_are_known_by_name_and_used_once() -> None:
    module = nn.Linear(2, 2)
    copies: dict[int, dict[torch.device, torch.Tensor]] = {module.weight.data_ptr(): {}}
    weights = {"weight": module.weight, "bias": module.bias}
    hook = AlignDevicesHook("cpu", offload=True, weights_map=weights, tied_params_map=copies)
    add_hook_to_module(module, hook)
    assert hook.tied_params_names == {"weight"}
    hook.pre_forward(module)
    assert copies[weights["weight"].data_ptr()] == {torch.device("cpu"): module.weight}
    hook.post_forward(module, None)
    assert copies[weights["weight"].data_ptr()] == {}


def test_a_device_that_is_not_there_is_refused_before_anything_is_moved() -> None:
    module = nn.Linear(1, 1)
    with pytest.raises(InvalidArgument, match="device 99"):
        add_hook_to_module(module, AlignDevicesHook(99, offload=True))
    assert set(devices(module).values()) == {"cpu"}
    assert "_hf_hook" not in module.__dict__


def test_it_shows_what_it_does() -> None:
    assert repr(AlignDevicesHook("cpu", offload=True)).startswith(
        "AlignDevicesHook(execution_device='cpu', offload=True"
    )
