"""Sizes of models of transformers, as arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import accelerate.utils as original
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins import megatron_models
from accelerate_cpp.plugins.megatron import MegatronLMPlugin

KINDS = ["megatron-bert", "gpt2", "t5", "llama"]
BATCH = {"input_ids": torch.zeros(2, 5), "labels": torch.zeros(2, 6)}


class Config:
    """Has any attribute: its own name."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"config.{name}"


class Model(torch.nn.Module):
    def __init__(self, model_type: str) -> None:
        super().__init__()
        self.config: Any = Config(model_type)


class ModelForMaskedLM(Model):
    pass


@pytest.fixture
def _registry() -> Iterator[None]:
    before = dict(megatron_models.MODEL_CONFIGS_TO_MEGATRON_PARSERS)
    yield
    megatron_models.MODEL_CONFIGS_TO_MEGATRON_PARSERS.clear()
    megatron_models.MODEL_CONFIGS_TO_MEGATRON_PARSERS.update(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", [Model, ModelForMaskedLM])
@pytest.mark.parametrize("batch", [None, BATCH], ids=["no batch", "batch"])
@pytest.mark.parametrize("lengths", [{}, {"decoder_seq_length": 12, "encoder_seq_length": 13}], ids=["free", "given"])
def test_the_arguments_are_the_originals(
    kind: str, model: type[Model], batch: dict[str, Any] | None, lengths: dict[str, int]
) -> None:
    own, theirs = MegatronLMPlugin(**lengths), original.MegatronLMPlugin(**lengths)
    megatron_models.write_model_arguments(own, model(kind), batch)
    theirs.set_network_size_args(model(kind), batch)
    assert vars(own) == vars(theirs)


@pytest.mark.parametrize("kind", ["megatron-bert", "gpt2", "llama"])
def test_a_length_that_is_given_counts(kind: str) -> None:
    plugin = MegatronLMPlugin(seq_length=11, encoder_seq_length=12, decoder_seq_length=13)
    megatron_models.write_model_arguments(plugin, Model(kind), BATCH)
    assert plugin.seq_length == plugin.megatron_lm_default_args["seq_length"] == 11


@pytest.mark.parametrize("model", [Model("opt"), torch.nn.Linear(1, 1)], ids=["other type", "no configuration"])
def test_a_model_of_another_kind_is_refused(model: torch.nn.Module) -> None:
    with pytest.raises(InvalidArgument, match="expected one of megatron-bert, gpt2, t5, llama, or register"):
        megatron_models.write_model_arguments(MegatronLMPlugin(), model, None)


@pytest.mark.usefixtures("_registry")
def test_further_kinds_can_be_registered() -> None:
    @megatron_models.add_model_config_to_megatron_parser("opt")
    def parse(plugin: Any, model: Any, batch: Any) -> None:
        plugin.megatron_lm_default_args["seen"] = (model.config.hidden_size, batch)

    plugin = MegatronLMPlugin()
    plugin.set_network_size_args(Model("OPT"), BATCH)
    assert callable(parse)
    assert plugin.megatron_lm_default_args["seen"] == ("config.hidden_size", BATCH)
    assert plugin.megatron_lm_default_args["model_return_dict"] == "config.return_dict"
