from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.tensor.plans import Plan, plan_for, tell_heads
from accelerate_cpp.parallel.tensor.sequences import region_of
from accelerate_cpp.parallel.tensor.styles import COLUMNS, COLUMNS_OF_TOKENS, ROWS, ROWS_OF_TOKENS, SUMMED


class Attention(nn.Module):
    def __init__(self, width: int = 8, heads: int = 4, kv_heads: int = 2, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.head_dim, self.q_norm = width // heads, norm or nn.Identity()
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.q_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width // heads * kv_heads)
        self.v_proj = nn.Linear(width, width // heads * kv_heads)

    def forward(self, hidden: torch.Tensor) -> Any:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        queries, keys, values = (one(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in layers)
        found = functional.scaled_dot_product_attention(self.q_norm(queries), keys, values, enable_gqa=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        self.attention, self.norm, self.between = Attention(), nn.LayerNorm(8), between or nn.GELU()
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.fc2(self.between(self.fc1(hidden)))


def test_attention_and_feed_forward_layers_are_found_by_names_and_shapes() -> None:
    plan = plan_for(nn.Sequential(nn.Linear(3, 8), Block()), None, 2)
    columns = dict.fromkeys(("1.attention.q_proj", "1.attention.k_proj", "1.attention.v_proj", "1.fc1"), COLUMNS)
    assert plan.styles == {**columns, "1.attention.o_proj": ROWS, "1.fc2": ROWS}
    assert plan.attention == ["1.attention"]


def test_what_computes_with_the_part_of_each_process_has_its_gradients_summed() -> None:
    model = nn.Sequential(Attention(norm=nn.LayerNorm(2)), Block(nn.PReLU()))
    styles = plan_for(model, None, 2).styles
    assert {name for name, style in styles.items() if style == SUMMED} == {"0.q_norm", "1.between"}


@pytest.mark.parametrize(
    "between", [nn.Softmax(-1), nn.LayerNorm(32), nn.PReLU(32)], ids=lambda one: type(one).__name__
)
def test_feed_forward_layers_stay_whole_if_a_part_depends_on_the_others(between: nn.Module) -> None:
    styles = plan_for(nn.Sequential(Block(between)), None, 2).styles
    assert "0.attention.q_proj" in styles
    assert "0.fc1" not in styles


def test_what_cannot_be_tried_stays_whole() -> None:
    class Masked(Attention):
        def forward(self, hidden: Any, mask: Any) -> Any:  # type: ignore[override]
            return super().forward(hidden + mask)

    with pytest.raises(InvalidArgument, match="Masked has no layer that tp_size=2 could split"):
        plan_for(Masked(), None, 2)
    with torch.device("meta"), pytest.raises(InvalidArgument, match="Block has no layer"):
        plan_for(Block(), None, 2)


def test_trying_leaves_a_model_as_it_was() -> None:
    block = Block(nn.Dropout(0.5))
    block.norm.requires_grad_(False)
    block.between.eval()
    state = torch.get_rng_state()
    assert plan_for(block, None, 2).styles
    assert torch.equal(torch.get_rng_state(), state)
    assert (block.training, block.between.training, block.norm.weight.requires_grad) == (True, False, False)
    assert all(parameter.grad is None for parameter in block.parameters())
    assert not block.fc1._forward_hooks
    assert not block.fc2._forward_pre_hooks


def test_layers_of_a_sequence_are_split_in_pairs_between_which_there_are_only_elementwise_functions() -> None:
    def sequence(between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), between, nn.Dropout(0.1), nn.Linear(6, 6), nn.Linear(6, 2))

    assert plan_for(sequence(nn.GELU()), None, 2).styles == {"0": COLUMNS, "3": ROWS}
    assert plan_for(sequence(nn.LayerNorm(6)), None, 2).styles == {"3": COLUMNS, "4": ROWS}


def test_layers_that_share_a_parameter_stay_whole() -> None:
    block = Block()
    tied = nn.Linear(32, 8)
    tied.weight = block.fc2.weight
    plan = plan_for(nn.ModuleList([block, tied]), None, 2)
    assert not {"0.fc1", "0.fc2"} & plan.styles.keys()
    assert "0.attention.q_proj" in plan.styles


def test_numbers_of_heads_that_a_module_reads_are_divided() -> None:
    attention = Attention()
    tell_heads(attention, 2)
    assert (attention.num_heads, attention.num_kv_heads) == (2, 1)


def test_a_part_of_a_model_has_its_part_of_the_plan() -> None:
    whole = nn.Sequential(nn.Linear(3, 8), Block(), Block())
    part = nn.ModuleDict({"1": whole[1]})
    plan = plan_for(whole, None, 2).of_part(part)
    assert {name.split(".")[0] for name in plan.styles} == {"1"}
    assert plan.attention == ["1.attention"]


def test_tokens_are_cut_where_blocks_begin_and_gathered_where_modules_hold_split_layers() -> None:
    model = nn.Sequential(nn.Linear(3, 8), Block(), Block())
    region = region_of(model, plan_for(model, None, 2).styles)
    assert region.blocks == ["1", "2"]
    assert region.gathering == ["1.attention", "2.attention"]
    assert (region.styles["1.fc1"], region.styles["1.fc2"]) == (COLUMNS_OF_TOKENS, ROWS_OF_TOKENS)
    assert (region.styles["1.attention.q_proj"], region.styles["1.attention.o_proj"]) == (COLUMNS, ROWS_OF_TOKENS)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (nn.Sequential(Block()), {"0.fc3": COLUMNS}, "the plan has '0.fc3', but Sequential has no such module"),
        (nn.Sequential(Block()), {"0.fc1": "sideways"}, "splits '0.fc1' by 'sideways', and expected is one of colwise"),
        (nn.Sequential(Block()), {"*.norm": COLUMNS}, "splits '0.norm', a LayerNorm"),
        (nn.Sequential(nn.Embedding(5, 4)), {"0": "embedding_rowwise"}, "'0' has num_embeddings=5"),
        (nn.Sequential(nn.Linear(4, 5)), {"0": COLUMNS}, "'0' has out_features=5, which is not divisible by tp_size=2"),
        (nn.Sequential(Attention(9, 3, 3)), None, "'0.q_proj' computes 3 heads"),
        (nn.LayerNorm(4), None, "LayerNorm has no layer that tp_size=2 could split"),
    ],
    ids=["no module", "style", "kind", "entries", "features", "heads", "nothing"],
)
def test_what_does_not_fit_is_refused(model: nn.Module, given: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        plan_for(model, given, 2)


def test_models_of_transformers_bring_their_plan() -> None:
    model = nn.Sequential(Block())
    model._tp_plan = {"*.fc1": COLUMNS, "*.fc2": ROWS, "absent": COLUMNS}  # type: ignore[assignment]
    assert plan_for(model, None, 2) == Plan({"0.fc1": COLUMNS, "0.fc2": ROWS})
