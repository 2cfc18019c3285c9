"""fp8 through TransformerEngine, against modules that stand in for it: the real one computes on GPUs only."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.precision.fp8_transformer_engine import casting, convert, weight_dtype


@pytest.fixture(autouse=True)
def library(transformer_engine: SimpleNamespace) -> SimpleNamespace:
    """What stands in for it."""
    return transformer_engine


def pair(*layers: nn.Module) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)


def test_layers_are_replaced_and_keep_their_values_and_settings(library: SimpleNamespace) -> None:
    te = library.pytorch
    torch.manual_seed(0)
    model, optimizer = pair(nn.Linear(16, 32, bias=False), nn.LayerNorm(32, eps=0.5), nn.Linear(32, 16))
    model[0].weight.requires_grad_(False)
    model.bfloat16().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = convert(model, optimizer, {})
    assert [type(layer) for layer in model.children()] == [te.Linear, te.LayerNorm, te.Linear]
    state = model.state_dict()
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert state.keys() == before.keys()
    assert model.get_parameter("0.weight").requires_grad is False
    assert model.get_parameter("2.weight").dtype == torch.bfloat16
    assert model.get_submodule("1").eps == 0.5
    assert not model.get_submodule("2").training


def test_other_sizes_and_shared_parameters_stay(library: SimpleNamespace) -> None:
    embedding, head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
    head.weight = embedding.weight
    model, optimizer = pair(embedding, nn.Linear(16, 20), nn.Linear(20, 16), nn.LayerNorm((4, 16)), head)
    model, _ = convert(model, optimizer, {})
    assert not any(isinstance(layer, (library.pytorch.Linear, library.pytorch.LayerNorm)) for layer in model.children())
    assert head.weight is embedding.weight


def test_a_layer_that_stands_twice_in_a_model_is_replaced_by_one(library: SimpleNamespace) -> None:
    layer = nn.Linear(16, 16)
    model, _ = convert(*pair(layer, nn.Sequential(layer)), {})
    assert model.get_submodule("0") is model.get_submodule("1.0")
    assert isinstance(model.get_submodule("0"), library.pytorch.Linear)


def test_the_optimizer_steps_on_the_new_parameters_with_the_state_of_the_old() -> None:
    model, optimizer = pair(nn.Linear(16, 16, bias=False), nn.Linear(16, 4))
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    momentum = optimizer.state[model[0].weight]["momentum_buffer"]
    converted, same = convert(model, optimizer, {})
    assert same is optimizer
    weight = converted.get_parameter("0.weight")
    assert [parameter for group in optimizer.param_groups for parameter in group["params"]] == list(
        converted.parameters()
    )
    assert optimizer.state[weight]["momentum_buffer"] is momentum
    before = weight.detach().clone()
    converted(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)


def test_models_compute_in_fp8_in_training_and_on_request_in_evaluation(library: SimpleNamespace) -> None:
    recipe = library.recipe.DelayedScaling(margin=2, fp8_format=library.recipe.Format.E4M3)
    for options, evaluation in (({}, False), ({"use_autocast_during_eval": True}, True)):
        cast = casting({"margin": 2, "fp8_format": "E4M3", **options})
        library.entered.clear()
        for training in (True, False):
            with cast(training):
                pass
        assert library.entered == [(True, recipe), (evaluation, recipe)]
        assert pickle.loads(pickle.dumps(cast)) == cast


def test_blocks_have_a_recipe_of_their_own_where_the_gpu_scales_them(library: SimpleNamespace) -> None:
    expected = library.recipe.MXFP8BlockScaling(margin=1)
    assert casting({"use_mxfp8_block_scaling": True, "margin": 1}).recipe == expected
    library.blocks = (False, "the GPU is too old")
    with pytest.raises(InvalidArgument, match="use_mxfp8_block_scaling=True: the GPU is too old"):
        casting({"use_mxfp8_block_scaling": True})


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"interval": 2}, "interval"),
        (
            {"use_mxfp8_block_scaling": True, "amax_history_len": 1, "amax_compute_algo": "max"},
            "amax_compute_algo, amax",
        ),
    ],
)
def test_options_that_the_recipe_does_not_have_are_refused(options: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgument, match=f"TERecipeKwargs sets {names}.*leave it out"):
        casting(options)


def test_the_weights_of_its_linear_layers_are_cast_to_fp8() -> None:
    model, _ = convert(*pair(nn.Linear(16, 16), nn.LayerNorm(16)), {})
    assert weight_dtype(model.get_submodule("0")) == torch.float8_e4m3fn
    assert weight_dtype(model.get_submodule("1")) is None
    assert weight_dtype(nn.Linear(16, 16)) is None
