"""Parameters that several modules share."""

from __future__ import annotations

import logging

import pytest
import torch
from accelerate.utils import find_tied_parameters as original
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.tied_parameters import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    ensure_weights_retied,
    find_tied_parameters,
    retie_on_each_device,
    retie_parameters,
    warn_of_untied,
)


def tied() -> nn.Module:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("z", "y", "x", "w")})
    model["y"].weight = model["w"].weight
    model["same"] = model["z"]
    model["x"].bias = model["z"].bias
    return model


def test_groups_are_those_of_the_original() -> None:
    assert sorted(find_tied_parameters(tied())) == sorted(original(tied()))
    assert find_tied_parameters(nn.Linear(1, 1), anything=1) == []


def test_retied_parameters_are_one_object_that_has_values() -> None:
    model = tied()
    groups = find_tied_parameters(model)
    model["y"].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    with_values = model["w"].weight
    retie_parameters(model, groups)
    assert model["y"].weight is with_values
    assert find_tied_parameters(model) == groups


def test_parameters_without_values_are_tied_among_each_other() -> None:
    model = tied().to("meta")
    model["y"].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    retie_parameters(model, [["w.weight", "y.weight"]])
    assert model["y"].weight is model["w"].weight


def test_retying_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'nope\.weight': ModuleDict has no module 'nope'"):
        retie_parameters(tied(), [["w.weight", "nope.weight"]])


def test_parameters_on_different_devices_stay_apart() -> None:
    model = tied()
    model["y"].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    model["z"].weight = nn.Parameter(torch.ones(2, 2))
    retie_on_each_device(model, [["w.weight", "y.weight", "z.weight"]])
    assert model["y"].weight.device.type == "meta"
    assert model["z"].weight is model["w"].weight


def test_parts_on_different_devices_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"": "disk"})
    assert not caplog.records
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": 1})
    assert "{'a.w': 0, 'b.w': 1}" in caplog.text


class PreTrainedModel(nn.Module):
    """Named as the base class of transformers' models."""

    def __init__(self, output: nn.Module | None = None, **config: object) -> None:
        super().__init__()
        self.config = type("Config", (), config)()
        self.output = output

    def get_output_embeddings(self) -> nn.Module | None:
        return self.output


class Tying(nn.Module):
    def _tie_weights(self) -> None: ...


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(1, 1), False),
        (PreTrainedModel(), False),
        (PreTrainedModel(nn.Linear(1, 1), tie_word_embeddings=True), True),
        (PreTrainedModel(None, tie_word_embeddings=True), False),
        (PreTrainedModel(is_encoder_decoder=True, tie_encoder_decoder=True), True),
        (PreTrainedModel(is_encoder_decoder=False, tie_encoder_decoder=True), False),
        (PreTrainedModel(Tying()), True),
    ],
)
def test_a_configuration_says_whether_parameters_are_shared(model: nn.Module, expected: bool) -> None:
    assert check_tied_parameters_in_config(model) is expected


def test_the_configuration_of_the_part_for_text_counts() -> None:
    model = PreTrainedModel(nn.Linear(1, 1))
    model.config.get_text_config = lambda decoder: type("Text", (), {"tie_word_embeddings": decoder})()  # type: ignore[attr-defined]
    assert check_tied_parameters_in_config(model)


def test_a_model_that_should_share_and_does_not_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = PreTrainedModel(nn.Linear(1, 1), tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        warn_of_untied(model, [["a", "b"]], "caller")
        warn_of_untied(nn.Linear(1, 1), [], "caller")
        assert not caplog.records
        warn_of_untied(model, [], "caller")
    assert "caller: the configuration of PreTrainedModel" in caplog.text


def test_initialising_module_by_module_keeps_parameters_shared() -> None:
    def renew(module: nn.Module) -> nn.Module:
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros_like(old)))
        return module

    model, plain = tied(), nn.Linear(1, 1)
    initialise = ensure_weights_retied(renew, model, torch.device("cpu"))
    groups = find_tied_parameters(model)
    for module in list(model.modules()):
        assert initialise(module) is module
    assert find_tied_parameters(model) == groups
    assert not model["w"].weight.any()
    assert ensure_weights_retied(renew, plain, None) is renew
