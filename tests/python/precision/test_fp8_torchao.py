"""fp8 through torchao."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType
from torchao.float8.float8_linear import Float8Linear

from accelerate_cpp.precision.fp8_torchao import convert, default_filter, weight_dtype

CONFIG = Float8LinearConfig(pad_inner_dim=True, enable_fsdp_float8_all_gather=True)


class Halved(nn.Linear):
    """A layer with a ``forward`` of its own, which torchao's would not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


def network(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), *middle, nn.Linear(32, 16))


def converted(model: nn.Module, module_filter: Any = None, config: Any = CONFIG, device_type: str = "cpu") -> nn.Module:
    return convert(model, {"config": config, "module_filter": module_filter}, device_type)


def in_fp8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def test_linear_layers_are_converted_but_for_the_first_and_the_last() -> None:
    assert in_fp8(converted(network(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)))) == ["1", "3"]


@pytest.mark.parametrize("layer", [nn.Linear(32, 20), nn.Linear(20, 32), nn.LayerNorm(32), Halved(32, 32)])
def test_other_sizes_and_layers_that_compute_otherwise_stay(layer: nn.Module) -> None:
    assert not default_filter(network(layer))(layer, "1")
    assert in_fp8(converted(network(layer))) == []


def test_what_attention_reads_itself_stays() -> None:
    assert in_fp8(converted(network(nn.TransformerEncoderLayer(32, 2, 64)))) == ["1.linear1", "1.linear2"]


def test_a_filter_of_the_users_own_replaces_the_rules() -> None:
    model = converted(network(nn.Linear(32, 32)), lambda module, name: name == "0")
    assert in_fp8(model) == ["0"]
    alone = nn.Linear(16, 16)
    assert isinstance(converted(alone, lambda module, name: True), Float8Linear)
    assert converted(alone) is alone


def test_parameters_stay_the_same_objects_so_that_optimizers_and_ties_hold() -> None:
    model = network(nn.Linear(32, 32))
    model[1].weight = model[2].weight = nn.Parameter(torch.randn(32, 32))
    before = list(model.parameters())
    converted(model)
    assert all(own is old for own, old in zip(model.parameters(), before, strict=True))
    assert model[1].weight is model[2].weight


@pytest.mark.parametrize(("device_type", "emulates"), [("cpu", True), ("cuda", False)])
def test_devices_without_fp8_imitate_it_and_no_weight_is_wrapped(device_type: str, emulates: bool) -> None:
    layer: Any = converted(network(nn.Linear(32, 32)), device_type=device_type)[1]  # type: ignore[index]
    assert (layer.config.emulate, layer.config.pad_inner_dim) == (emulates, True)
    assert type(layer.weight) is nn.Parameter
    assert CONFIG.enable_fsdp_float8_all_gather, "the user's configuration is not changed"


def test_operands_are_rounded_to_fp8_with_a_scale_for_each_tensor() -> None:
    torch.manual_seed(0)
    layer: Any = converted(network(nn.Linear(32, 48)))[1]  # type: ignore[index]
    x = torch.randn(4, 32)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        scale = torch.finfo(torch.float8_e4m3fn).max / tensor.abs().max()
        return (tensor * scale).to(torch.float8_e4m3fn).float() / scale

    expected = rounded(x) @ rounded(layer.weight).t() + layer.bias
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert (layer(x) - nn.functional.linear(x, layer.weight, layer.bias)).abs().max() > 1e-3


def test_the_dtype_of_the_weight_is_that_of_the_configuration() -> None:
    assert weight_dtype(converted(network(nn.Linear(32, 32)))[1]) == torch.float8_e4m3fn  # type: ignore[index]
    assert weight_dtype(nn.Linear(32, 32)) is None
    off = CastConfig(scaling_type=ScalingType.DISABLED)
    config = Float8LinearConfig(cast_config_input=off, cast_config_weight=off, cast_config_grad_output=off)
    assert weight_dtype(converted(network(nn.Linear(32, 32)), config=config)[1]) is None  # type: ignore[index]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_converted_model_can_be_copied(duplicate: Any) -> None:
    model = converted(network(nn.Linear(32, 32)))
    x = torch.randn(2, 16)
    other = duplicate(model)
    assert torch.equal(other(x), model(x))
    assert other[1].weight is not model[1].weight  # type: ignore[index]
