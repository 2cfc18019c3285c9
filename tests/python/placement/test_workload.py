"""What a model needs beside its weights, against what a real one takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.kv_cache import kv_cache_bytes
from accelerate_cpp.placement.model_memory import Alive, saved_bytes
from accelerate_cpp.placement.workload import Needs, Workload, needs_of
from accelerate_cpp.plugins.enums import CustomDtype

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
CONFIG = LlamaConfig(**SMALL, num_key_value_heads=2, vocab_size=200, max_position_embeddings=64)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return on_meta(lambda: LlamaForCausalLM(CONFIG))


def test_to_generate_each_layer_has_the_cache_of_a_real_one(llama: nn.Module) -> None:
    needs = needs_of(llama, Workload(batch_size=2, sequence_length=20), torch.float16)
    cache = LlamaForCausalLM(CONFIG).half()(torch.ones(2, 20, dtype=torch.long), use_cache=True).past_key_values
    layers = {f"model.layers.{n}": part.keys.nbytes + part.values.nbytes for n, part in enumerate(cache.layers)}
    assert needs.of_modules == layers


def test_to_generate_each_accelerator_has_the_most_that_a_real_run_keeps_alive(llama: nn.Module) -> None:
    needs = needs_of(llama, Workload(batch_size=2, sequence_length=20))
    real = LlamaForCausalLM(CONFIG).eval()
    with torch.no_grad(), Alive([*real.parameters(), *real.buffers()]) as alive:
        real(torch.zeros(2, 20, dtype=torch.long), use_cache=False, logits_to_keep=1)
    assert needs.everywhere == pytest.approx(alive.peak, rel=0.1)
    half = needs_of(llama, Workload(batch_size=2, sequence_length=20, dtype="float16"))
    assert needs.everywhere / 2.2 < half.everywhere < needs.everywhere / 1.4


def test_in_training_each_module_has_what_autograd_saves_in_it() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) * 2).exp()

    inputs = torch.zeros(3, 8)
    needs = needs_of(on_meta(Step), Workload(training=True, make_inputs=lambda: ((torch.zeros(3, 8),), {})))
    real = Step()
    assert needs == Needs({"first": 4 * 3 * 8, "second.0": 4 * 3 * 16, "": 4 * 3 * 4}, 0)
    assert sum(needs.of_modules.values()) == saved_bytes(lambda: real(inputs), real.parameters())


def test_training_counts_the_loss_and_no_cache(llama: nn.Module) -> None:
    needs = needs_of(llama, Workload(batch_size=2, sequence_length=20, training=True))
    real, tokens = LlamaForCausalLM(CONFIG), torch.zeros(2, 20, dtype=torch.long)
    saved = saved_bytes(lambda: real(tokens, labels=tokens, use_cache=False), [*real.parameters(), *real.buffers()])
    assert sum(needs.of_modules.values()) == pytest.approx(saved, rel=0.15)  # kernels of attention differ
    assert needs.everywhere == 0


def test_the_cache_of_a_decoder_is_in_the_decoder() -> None:
    config = T5Config(d_model=32, d_kv=6, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=50)
    model = on_meta(lambda: T5ForConditionalGeneration(config))
    needs = needs_of(model, Workload(sequence_length=9))
    sizes = kv_cache_bytes(config, 1, 9, torch.float32)
    assert needs.of_modules == {f"decoder.block.{n}": size for n, size in enumerate(sizes)}


def test_models_that_do_not_generate_have_no_cache() -> None:
    bert = on_meta(lambda: BertForMaskedLM(BertConfig(**SMALL, vocab_size=50)))
    vit = on_meta(lambda: ViTForImageClassification(ViTConfig(**SMALL, image_size=32)))
    for model in (bert, vit):
        needs = needs_of(model, Workload(batch_size=2, sequence_length=16))
        assert needs.of_modules == {}
        assert needs.everywhere > 0


def test_figures_that_are_given_are_taken(llama: nn.Module) -> None:
    given = Workload(sequence_length=4, activation_bytes=77)
    assert needs_of(llama, given).everywhere == 77
    cache = needs_of(llama, given).of_modules["model.layers.1"]
    by_class = needs_of(llama, Workload(sequence_length=4, class_bytes={"LlamaDecoderLayer": 5, "LlamaRMSNorm": 2}))
    assert by_class.everywhere == 0
    assert by_class.of_modules["model.layers.1"] == cache + 5
    assert by_class.of_modules["model.norm"] == 2
    assert needs_of(nn.Linear(2, 2), Workload(class_bytes={"Linear": 3}, training=True)) == Needs({"": 3}, 0)
    assert needs_of(llama, None) == Needs({}, 0)


def test_weights_of_integers_leave_activations_in_the_dtype_of_the_model(llama: nn.Module) -> None:
    workload = Workload(sequence_length=4)
    expected = needs_of(llama, workload)
    assert needs_of(llama, workload, torch.int8) == needs_of(llama, workload, CustomDtype.INT4) == expected


def test_a_model_without_a_configuration_needs_inputs() -> None:
    linear = nn.Linear(8, 4)
    with pytest.raises(InvalidArgument, match=r"Linear is not a model of transformers.* pass make_inputs"):
        needs_of(linear, Workload())
    needs = needs_of(linear, Workload(make_inputs=lambda: ((torch.zeros(3, 8),), {})))
    assert needs == Needs({}, 4 * (3 * 8 + 3 * 4))


def test_a_pass_that_looks_at_values_is_refused_with_what_to_do() -> None:
    class Looking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    for training, advice in ((False, "activation_bytes"), (True, "class_bytes")):
        workload = Workload(training=training, make_inputs=lambda: ((torch.zeros(1, 3),), {}))
        with pytest.raises(InvalidArgument, match=rf"pass of Looking without data failed.*; pass {advice}"):
            needs_of(Looking(3, 3), workload)


def test_too_many_tokens_and_layers_that_are_nowhere_are_refused(llama: nn.Module) -> None:
    with pytest.raises(InvalidArgument, match="sequence_length 65: LlamaForCausalLM takes at most 64 tokens"):
        needs_of(llama, Workload(sequence_length=65))
    model: Any = nn.Linear(2, 2)
    model.config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=1, hidden_size=2)
    with pytest.raises(InvalidArgument, match="Linear has no list of 2 layers"):
        needs_of(model, Workload(sequence_length=4, activation_bytes=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0; expected 1 or more"),
        ({"sequence_length": -1}, "sequence_length=-1; expected 1 or more"),
        ({"activation_bytes": -1}, "activation_bytes=-1; expected 0 or more"),
        ({"class_bytes": {"Linear": -2}}, r"class_bytes\['Linear'\]=-2"),
    ],
)
def test_figures_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"Workload: {message}"):
        Workload(**options)
