"""Parts of decoders that are described by numbers, and of real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.models import parts_of
from accelerate_cpp.parallel.costs.parts import Decoder, Weight
from accelerate_cpp.parallel.pipeline.cut import cut_model
from accelerate_cpp.parallel.tensor.plans import Plan, plan_for

LLAMA = Decoder(layers=6, hidden=32, heads=4, kv_heads=2, intermediate=80, vocabulary=640)


def on_meta(kind: str = "Llama", **options: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=LLAMA.layers,
        hidden_size=LLAMA.hidden,
        num_attention_heads=LLAMA.heads,
        num_key_value_heads=LLAMA.kv_heads,
        intermediate_size=LLAMA.intermediate,
        vocab_size=LLAMA.vocabulary,
        **options,
    )
    with torch.device("meta"):
        return getattr(transformers, f"{kind}ForCausalLM")(config)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_a_described_decoder_has_the_parts_of_a_real_one(stages: int, tied: bool) -> None:
    model = on_meta(tie_word_embeddings=tied)
    modules = [model] if stages == 1 else cut_model(model, stages).stages
    described = Decoder(**{**vars(LLAMA), "tied": tied})
    found = parts_of(model, modules, plan_for(model, None, 2))
    for part, expected in zip(described.parts(stages), found, strict=True):
        assert sorted(part.units[-1], key=str) == sorted(expected.units[-1], key=str)
        assert [sorted(unit, key=str) for unit in part.units] == [sorted(unit, key=str) for unit in expected.units]
        assert {**vars(part), "units": ()} == {**vars(expected), "units": ()}
    assert described.parameters == sum(weight.numel() for weight in model.parameters())


def test_without_a_plan_nothing_is_split() -> None:
    (part,) = parts_of(model := on_meta(), [model], Plan({}))
    assert (part.columns, part.rows, part.gathering, part.of_tokens, part.gathered_features) == (0, 0, 0, (), 0)
    assert not part.split_embedding
    assert {weight.split for weight in part.weights} == {None}


def test_biases_and_norms_of_heads_are_found() -> None:
    (part,) = parts_of(model := on_meta("Qwen3", head_dim=16), [model], plan_for(model, None, 2))
    assert part.in_parts == (16,) * 2 * LLAMA.layers
    assert part.kv_features == 2 * 16
    (part,) = parts_of(model := on_meta("Qwen2"), [model], plan_for(model, None, 2))
    assert Weight((32,), 0) in part.weights  # the bias of queries, whose outputs are split
    assert part.columns == 2 * LLAMA.layers


def test_styles_whose_communication_is_not_known_are_refused() -> None:
    model = on_meta()
    with pytest.raises(InvalidArgument, match=r"'lm_head' of LlamaForCausalLM is split by 'colwise_rep'"):
        parts_of(model, [model], Plan({"lm_head": "colwise_rep"}))


def test_a_model_that_says_nothing_of_its_heads_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"Linear does not say num_attention_heads"):
        parts_of(layer := torch.nn.Linear(2, 2), [layer], Plan({}))


def test_weights_are_split_and_then_sharded_by_rows() -> None:
    weight = Weight((10, 6), 1)
    assert weight.here(2) == (10, 3)
    assert weight.elements(2) == 30
    assert weight.padded_shard(2, 4) == 3 * 3  # rows 3, 3, 3 and 1
    assert Weight((10, 6), 0).here(2) == (5, 6)
    assert Weight(()).padded_shard(1, 4) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 0}, "layers=0; expected 1 or more"),
        ({"kv_heads": 3}, "expected heads that divide hidden and are a multiple of kv_heads"),
        ({"hidden": 30}, "expected heads that divide hidden"),
    ],
)
def test_impossible_decoders_are_refused(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Decoder(**{**vars(LLAMA), **wrong})


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"9 stages of 6 layers; expected 1 to 8"):
        LLAMA.parts(9)
