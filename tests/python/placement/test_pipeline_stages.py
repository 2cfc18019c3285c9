"""Where stages begin, from sizes of modules alone: models are on the meta device."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.pipeline_stages import choose_split_points


class Layer(nn.Module):
    """So many parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.first, self.second = Layer(sizes[0]), Layer(sizes[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Model(nn.Module):
    """A parameter of its own, a list of blocks, which is not called itself, and a head."""

    def __init__(self, *blocks: nn.Module, head: int = 1, own: int = 1) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.empty(own, device="meta"))
        self.blocks = nn.ModuleList(blocks)
        self.head = Layer(head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_stages_begin_where_they_are_even() -> None:
    model = Model(*[Layer(10) for _ in range(6)])
    assert choose_split_points(model, 1) == []
    assert choose_split_points(model, 2) == ["blocks.3"]
    assert choose_split_points(model, 3) == ["blocks.2", "blocks.4"]


def test_blocks_are_taken_apart_only_if_that_makes_stages_more_even_by_a_tenth() -> None:
    assert choose_split_points(Model(*[Block(5, 5) for _ in range(4)]), 2) == ["blocks.2"]
    assert choose_split_points(Model(*[Block(5, 5) for _ in range(3)]), 2) == ["blocks.1.second"]
    assert choose_split_points(Model(*[Block(5, 5) for _ in range(3)]), 2, ["Block"]) == ["blocks.2"]
    assert choose_split_points(Model(*[Block(5, 5) for _ in range(3)]), 2, "Block") == ["blocks.2"]


def test_a_parameter_counts_for_the_stage_of_the_module_after_it() -> None:
    assert choose_split_points(Model(*[Layer(10) for _ in range(4)], own=20), 2) == ["blocks.1"]


def test_a_list_of_modules_stands_for_the_first_in_it() -> None:
    model = Model(nn.ModuleList(), nn.ModuleList([Layer(50), Layer(50)]), own=100)
    assert choose_split_points(model, 2) == ["blocks.1.1"]
    model.blocks.insert(0, Layer(100))
    assert choose_split_points(model, 3) == ["blocks.2.0", "head"]


def test_every_stage_has_a_module() -> None:
    model = nn.Sequential(Layer(1), Layer(1), Layer(1000))
    assert choose_split_points(model, 3) == ["1", "2"]
    model = nn.Sequential(Layer(1000), Layer(1), Layer(1))
    assert choose_split_points(model, 3) == ["1", "2"]
    with pytest.raises(InvalidArgument, match=r"Sequential has 3 modules .*there are 4 processes; start fewer"):
        choose_split_points(model, 4)


def test_the_largest_stage_is_as_small_as_neighbours_allow() -> None:
    chance = random.Random(0)
    for _ in range(200):
        sizes = [chance.randrange(1, 50) for _ in range(chance.randrange(2, 9))]
        count = chance.randrange(2, len(sizes) + 1)
        model = nn.Sequential(*map(Layer, sizes))
        starts = [0, *map(int, choose_split_points(model, count)), len(sizes)]
        assert starts == sorted(set(starts))
        largest = max(sum(sizes[start:end]) for start, end in itertools.pairwise(starts))
        best = min(
            max(sum(sizes[start:end]) for start, end in itertools.pairwise((0, *cuts, len(sizes))))
            for cuts in itertools.combinations(range(1, len(sizes)), count - 1)
        )
        assert largest == best, (sizes, count)
