"""Cuts: stages that follow each other compute what the model does, and are as equally expensive as they can be."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import cost_of, sendable
from accelerate_cpp.parallel.pipeline.cut import balanced_starts, cut_model, divide
from test_pipeline import decoder, rows_of_text, sequence

DECODERS = ["llama", "tied llama", "gpt2", "qwen2", "mistral", "qwen3", "gpt_neox", "opt", "gemma"]


def in_stages(stages: list[nn.Module], inputs: Any, **kwargs: Any) -> Any:
    for stage in stages:
        inputs = stage(inputs, **kwargs)
    return inputs


@pytest.mark.parametrize("count", range(1, 10))
def test_stages_of_a_sequence_compute_what_it_does(count: int) -> None:
    model = sequence()
    cut = cut_model(model, count)
    inputs = torch.randn(4, 6)
    assert torch.equal(in_stages(cut.stages, inputs), model(inputs))
    assert len(cut.stages) == len(cut.begins) == count
    names = [name for stage in cut.stages for name in stage.state_dict()]
    assert names == list(model.state_dict())
    assert cut.begins[0] == "0"


@pytest.mark.parametrize("kind", DECODERS)
def test_stages_of_a_decoder_compute_what_it_does(kind: str) -> None:
    pytest.importorskip("transformers")
    model = decoder(kind).eval()
    batch = rows_of_text(0)
    named = {"attention_mask": batch["attention_mask"]}
    expected = model(batch["input_ids"], **named).logits
    before = list(model.state_dict())
    for count in (1, 3, 9):
        cut = cut_model(model, count)
        torch.testing.assert_close(in_stages(cut.stages, batch["input_ids"], **named), expected)
        assert {name for stage in cut.stages for name in stage.state_dict()} == set(before)
        tied = {name for tie in cut.ties for name in tie.names.values()}
        names = [name for stage in cut.stages for name, _ in stage.named_parameters()]
        assert sorted(set(names) - tied) == sorted(set(dict(model.named_parameters())) - tied)
    assert list(model.state_dict()) == before  # as it was
    torch.testing.assert_close(model(batch["input_ids"], **named).logits, expected)


def test_weights_of_several_stages_are_ties() -> None:
    pytest.importorskip("transformers")
    assert cut_model(decoder("llama"), 4).ties == []
    (tie,) = cut_model(decoder("gpt2"), 4).ties
    assert tie.names == {0: "transformer.wte.weight", 3: "lm_head.weight"}
    assert cut_model(decoder("gpt2"), 1).ties == []
    shared = nn.Linear(2, 2)
    ties = cut_model(nn.Sequential(shared, nn.Linear(2, 2), shared), 3).ties
    assert [one.names for one in ties] == [{0: "0.weight", 2: "2.weight"}, {0: "0.bias", 2: "2.bias"}]


def test_the_most_expensive_stage_is_as_cheap_as_any_cut_allows() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        widths = torch.randint(1, 40, (9,), generator=generator).tolist()
        model = nn.Sequential(*(nn.Linear(inner, outer) for inner, outer in pairwise(widths)))
        costs = [2 * sum(p.nbytes for p in layer.parameters()) for layer in model]
        for count in (2, 3, 5, 8):
            stages = cut_model(model, count).stages
            found = max(sum(costs[int(name)] for name, _ in stage.named_children()) for stage in stages)
            least = min(
                max(sum(costs[begin:end]) for begin, end in pairwise((0, *points, 8)))
                for points in combinations(range(1, 8), count - 1)
            )
            assert found == least
            assert all(len(list(stage.children())) for stage in stages)


def test_entries_without_parameters_fill_no_stage_with_nothing() -> None:
    model = nn.Sequential(*(nn.ReLU() for _ in range(5)), nn.Linear(9, 9))
    for count in range(1, 7):
        assert [len(list(stage.children())) for stage in cut_model(model, count).stages].count(0) == 0


def test_a_token_is_multiplied_with_a_head_but_not_with_embeddings() -> None:
    embedding, head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
    assert cost_of([head]) == 2 * cost_of([embedding]) == 2 * 100 * 8 * 4
    head.weight = embedding.weight
    assert cost_of([embedding, head]) == cost_of([head])


def test_split_points_are_names_of_blocks_in_order() -> None:
    pytest.importorskip("transformers")
    cut = cut_model(decoder("llama"), 3, ["model.layers.2", "lm_head"])
    assert cut.begins == ["model.embed_tokens", "model.layers.2", "model.norm"]
    with pytest.raises(InvalidArgument, match=r"'model\.layers\.9', with which no stage of LlamaForCausalLM can begin"):
        cut_model(decoder("llama"), 2, ["model.layers.9"])
    with pytest.raises(InvalidArgument, match="make 2 stages; expected 2 names for 3 stages"):
        cut_model(sequence(), 3, ["2.0"])
    for points in (["4", "2.0"], ["4", "4"], ["0", "4"]):
        with pytest.raises(InvalidArgument, match="are not in the order of Sequential"):
            cut_model(sequence(), 3, points)


def test_a_model_on_the_meta_device_is_cut() -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"):
        model = decoder("llama")
    assert cut_model(model, 2).begins == cut_model(decoder("llama"), 2).begins


class Net(nn.Module):
    def forward(self, inputs: Any) -> Any:
        return inputs


class Branching(nn.Sequential):
    def forward(self, inputs: Any) -> Any:
        return inputs + super().forward(inputs)


def test_models_that_cannot_be_cut_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    for model in (Net(), Branching(nn.Linear(2, 2), nn.Linear(2, 2))):
        with pytest.raises(
            InvalidArgument, match=f"{type(model).__name__} cannot be cut into stages; expected an nn.Seq"
        ):
            cut_model(model, 2)
    # One that branches is one entry of a sequence.
    nested = nn.Sequential(nn.Linear(2, 2), Branching(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert cut_model(nested, 2).begins == ["0", "1"]
    with pytest.raises(
        InvalidArgument, match="Sequential has 2 blocks that a stage can begin with, but 3 stages are needed"
    ):
        cut_model(nested, 3)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
    scaled = transformers.GraniteConfig(**sizes, intermediate_size=24, num_key_value_heads=1, embedding_multiplier=3.0)
    with pytest.raises(InvalidArgument, match=r"GraniteForCausalLM cannot be cut .* changes hidden states outside"):
        cut_model(transformers.GraniteForCausalLM(scaled), 2)
    projecting = transformers.OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=8)
    with pytest.raises(
        InvalidArgument, match=r"OPTForCausalLM has model.decoder.project_out \(Linear\) beside its layers"
    ):
        cut_model(transformers.OPTForCausalLM(projecting), 2)
    routed = transformers.MixtralConfig(**sizes, intermediate_size=24, num_key_value_heads=1, output_router_logits=True)
    with pytest.raises(InvalidArgument, match="adds the losses of its routers"):
        cut_model(transformers.MixtralForCausalLM(routed), 2)
    with pytest.raises(InvalidArgument, match="BertModel cannot be cut into stages"):
        cut_model(transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=24)), 2)


def test_what_is_sent_is_contiguous_and_no_view() -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    kept = torch.ones(2)
    transposed, view, same = sendable((whole.T, whole[0], kept))
    assert transposed.is_contiguous()
    assert not view._is_view()
    assert same is kept


def test_names_of_sequences_inside_begin_stages() -> None:
    """Those that begin with the entry."""
    model = sequence()
    assert [block.names for block in divide(model).blocks][2:5] == [("2.0", "2"), ("2.1",), ("2.2.0", "2.2")]
    assert cut_model(model, 3, ["2", "2.2"]).begins == ["0", "2.0", "2.2.0"]


def test_few_modules_are_cut_if_stages_are_nearly_as_even() -> None:
    costs = [10, 10, 10, 10, 11]
    assert balanced_starts(costs, 2) == [0, 3]
    assert balanced_starts([10, 10, 10, 10], 2, [(0, 3)], 0.1) == [0, 2]
    assert balanced_starts([10, 10, 11, 10], 2, [(1, 3)], 0.1) == [0, 2]
    assert balanced_starts([20, 1, 1, 20], 2) == [0, 2]
    assert balanced_starts([20, 1, 1, 20], 2, [(1, 3)], 0.1) in ([0, 1], [0, 3])
    assert balanced_starts([1, 1, 1000], 3, [(0, 2)], 0.1) == [0, 1, 2], "each stage has a block"


def test_buffers_count_once() -> None:
    layer = nn.BatchNorm1d(4, affine=False)
    assert cost_of([layer]) == sum(buffer.nbytes for buffer in layer.buffers())
