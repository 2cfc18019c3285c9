"""TransformerEngine's layers and contexts, against modules that stand in for it: the real one computes on GPUs only."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import MissingLibrary
from accelerate_cpp.utils import (
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32, eps=0.5), nn.Linear(32, 20))
    model.eval()[0].weight.requires_grad_(False)
    return model


def test_layers_become_the_librarys_and_torchs_again(transformer_engine: SimpleNamespace) -> None:
    te, model = transformer_engine.pytorch, network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not has_transformer_engine_layers(model)
    assert convert_model(model) is None
    assert [type(layer) for layer in model] == [te.Linear, te.LayerNorm, nn.Linear]
    assert has_transformer_engine_layers(model)
    convert_model(model, to_transformer_engine=False)
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.Linear]
    assert not has_transformer_engine_layers(model)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
    assert not model[0].weight.requires_grad
    assert model[1].weight.requires_grad
    assert model[1].eps == 0.5
    assert not model[0].training


def test_one_kind_of_layers_can_be_left_out(transformer_engine: SimpleNamespace) -> None:
    te, model = transformer_engine.pytorch, network()
    convert_model(model, _convert_linear=False)
    assert [type(layer) for layer in model] == [nn.Linear, te.LayerNorm, nn.Linear]
    convert_model(model, _convert_ln=False)
    assert [type(layer) for layer in model] == [te.Linear, te.LayerNorm, nn.Linear]
    convert_model(model, to_transformer_engine=False, _convert_linear=False)
    assert [type(layer) for layer in model] == [te.Linear, nn.LayerNorm, nn.Linear]
    convert_model(model, to_transformer_engine=False, _convert_ln=False)
    assert [type(layer) for layer in model] == [nn.Linear, nn.LayerNorm, nn.Linear]


def test_a_layer_of_the_library_without_bias_stays_without(transformer_engine: SimpleNamespace) -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    convert_model(model)
    model[0].bias = nn.Parameter(torch.empty(0))  # how the library says that there is none
    convert_model(model, to_transformer_engine=False)
    assert model[0].bias is None


def test_a_block_of_the_library_is_a_layer_of_it(transformer_engine: SimpleNamespace) -> None:
    assert has_transformer_engine_layers(nn.Sequential(transformer_engine.pytorch.TransformerLayer()))


@pytest.mark.parametrize("use_during_eval", [False, True])
def test_a_forward_is_computed_in_fp8_in_training(transformer_engine: SimpleNamespace, use_during_eval: bool) -> None:
    model, recipe = nn.Linear(2, 2), transformer_engine.recipe.DelayedScaling(margin=3)
    own = model.forward
    forward = contextual_fp8_autocast(own, recipe, use_during_eval)
    assert forward.__wrapped__ == own  # type: ignore[attr-defined]
    batch = torch.ones(1, 2)
    assert torch.equal(forward(model, input=batch), own(batch))
    forward(model.eval(), batch)
    assert transformer_engine.entered == [(True, recipe), (use_during_eval, recipe)]


def test_a_model_is_wrapped_by_the_recipe_of_a_handler(transformer_engine: SimpleNamespace) -> None:
    model, recipes = network().train(), transformer_engine.recipe
    handler = TERecipeKwargs(margin=2, fp8_format="E4M3", use_autocast_during_eval=True)
    assert apply_fp8_autowrap(model, handler) is model
    model(torch.ones(1, 16))
    model.eval()(torch.ones(1, 16))
    expected = recipes.DelayedScaling(margin=2, fp8_format=recipes.Format.E4M3)
    assert transformer_engine.entered == [(True, expected)] * 2
    transformer_engine.entered.clear()
    apply_fp8_autowrap(network().train(), None)(torch.ones(1, 16))
    assert transformer_engine.entered == [(True, recipes.DelayedScaling())]


def test_without_the_library_there_are_no_layers_and_the_rest_says_how_to_install_it(
    only_installed: Callable[..., None],
) -> None:
    only_installed()
    assert not has_transformer_engine_layers(network())
    for call in (
        lambda: convert_model(network()),
        lambda: contextual_fp8_autocast(network().forward, None),
        lambda: apply_fp8_autowrap(network(), None),
    ):
        with pytest.raises(MissingLibrary, match=r"\(\.\.\.\): fp8 training through TransformerEngine.*pip install"):
            call()
