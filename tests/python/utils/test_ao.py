"""Models in fp8 by torchao: as the original converts them."""

from __future__ import annotations

from collections.abc import Callable

import accelerate.utils as original
import accelerate.utils.ao as original_ao
import pytest
import torch
from torch import nn

from accelerate_cpp.errors import MissingLibrary
from accelerate_cpp.utils import convert_model_to_fp8_ao, filter_first_and_last_linear_layers, has_ao_layers
from accelerate_cpp.utils.ao import filter_linear_layers, find_first_last_linear_layers


def network() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = ((16, 32), (32, 20), (20, 32), (32, 48), (48, 32), (32, 16))
    return nn.Sequential(*[nn.Linear(*size) for size in sizes], nn.LayerNorm(16))


def test_the_layers_of_the_original_are_replaced_and_parameters_stay_the_same_objects() -> None:
    model, theirs = network(), network()
    parameters = list(map(id, model.parameters()))
    assert not has_ao_layers(model)
    assert convert_model_to_fp8_ao(model) is None
    original.convert_model_to_fp8_ao(theirs)
    assert [type(layer) for layer in model] == [type(layer) for layer in theirs]
    assert [type(layer).__name__ for layer in model].count("Float8Linear") == 2
    assert has_ao_layers(model)
    assert list(map(id, model.parameters())) == parameters


def test_a_converted_model_computes_where_there_is_no_fp8() -> None:
    model, batch = network(), torch.rand(16, 16)
    expected = model(batch)
    convert_model_to_fp8_ao(model)
    found = model(batch)
    found.sum().backward()
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)
    assert model[3].weight.grad is not None


def test_a_filter_and_a_configuration_of_the_users_own_decide() -> None:
    from torchao.float8 import Float8LinearConfig

    model, asked = network(), []

    def only_the_first(layer: nn.Module, name: str) -> bool:
        asked.append(name)
        return name == "0"

    convert_model_to_fp8_ao(model, Float8LinearConfig.from_recipe_name("rowwise"), only_the_first)
    assert [type(layer).__name__ for layer in model] == ["Float8Linear", *["Linear"] * 5, "LayerNorm"]
    assert set(asked) >= {"0", "5"}
    assert model[0].config.cast_config_weight.scaling_granularity.value == "axiswise"


def test_the_filter_says_what_the_originals_says() -> None:
    model = network()
    for name, layer in model.named_children():
        for module in (model, layer):
            expected = original.filter_first_and_last_linear_layers(module, name)
            assert filter_first_and_last_linear_layers(module, name) == expected, (name, module)
    assert not filter_first_and_last_linear_layers(nn.Linear(16, 16), "")


def test_a_filter_of_ones_own_is_asked_as_in_the_original() -> None:
    model = network()
    outer = find_first_last_linear_layers(model)
    assert outer == original_ao.find_first_last_linear_layers(model) == ("0", "5")
    assert find_first_last_linear_layers(nn.LayerNorm(2)) == (None, None)
    for left_out in (outer, ["3"], []):
        for name, layer in model.named_children():
            expected = original_ao.filter_linear_layers(layer, name, left_out)
            assert filter_linear_layers(layer, name, left_out) == expected, (name, left_out)


def test_without_the_library_there_are_no_layers_and_converting_says_how_to_install_it(
    only_installed: Callable[..., None],
) -> None:
    only_installed()
    assert not has_ao_layers(network())
    with pytest.raises(MissingLibrary, match=r"convert_model_to_fp8_ao\(\.\.\.\).*pip install torchao"):
        convert_model_to_fp8_ao(network())
