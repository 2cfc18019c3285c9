"""Models as parts with names and sizes."""

from __future__ import annotations

import torch
from torch import nn

from accelerate_cpp.placement.model_parts import survey, with_inner
from accelerate_cpp.placement.module_sizes import Measure


class Block(nn.Module):
    """A parameter, two layers, and two buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2, bias=False)
        self.register_buffer("saved", torch.zeros(5))
        self.register_buffer("other", torch.zeros(7), persistent=False)


def test_a_module_is_made_of_its_parameters_its_modules_and_the_buffers_that_are_saved() -> None:
    parts, ties, sizes = survey(nn.Sequential(Block()), Measure(), frozenset())
    (block,) = parts
    assert [(part.name, part.size, part.is_module) for part in block.parts] == [
        ("0.scale", 12, False),
        ("0.first", 24, True),
        ("0.second", 16, True),
        ("0.saved", 20, False),
    ]
    assert (block.name, block.size, block.buffer_bytes) == ("0", 100, 48)
    assert (ties, sizes) == ([], {})


def test_of_the_whole_model_all_buffers_are_parts() -> None:
    names = [part.name for part in survey(Block(), Measure(), frozenset()).parts]
    assert names == ["scale", "first", "second", "saved", "other"]


def test_modules_that_stay_whole_have_no_parts() -> None:
    (block,) = survey(nn.Sequential(Block()), Measure(), frozenset({"Block"})).parts
    assert (block.size, block.parts) == (100, [])


def test_a_shared_parameter_counts_under_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    parts, ties, sizes = survey(model, Measure(), frozenset())
    assert [part.size for part in parts] == [16, 0]
    assert (ties, sizes) == ([["0.weight", "1.weight"]], {"0.weight": 16})


def test_a_shared_buffer_counts_once_and_ties_nothing() -> None:
    model = nn.Sequential(nn.Module(), nn.Module())
    buffer = torch.zeros(4)
    for module in model:
        module.register_buffer("table", buffer)
    parts, ties, _ = survey(model, Measure(), frozenset())
    assert ([part.size for part in parts], ties) == ([16, 0], [])


def test_a_module_with_two_names_is_two_parts_if_it_has_tensors() -> None:
    model = nn.Module()
    model.layer = model.same = nn.Linear(1, 1)
    model.act = model.same_act = nn.ReLU()
    parts, ties, _ = survey(model, Measure(), frozenset())
    assert [part.name for part in parts] == ["layer", "same", "act"]
    assert ties == [["layer.weight", "same.weight"], ["layer.bias", "same.bias"]]


def test_what_modules_hold_counts_in_them_and_in_the_first_part_of_those_that_are_split() -> None:
    held = {"": 1, "0": 10, "0.second": 100}
    (block,) = survey(nn.Sequential(Block()), Measure(), frozenset(), held).parts
    assert (block.size, block.held_bytes) == (100 + 111, 111)
    assert [(part.size, part.held_bytes) for part in block.parts] == [(12 + 11, 11), (24, 0), (16 + 100, 100), (20, 0)]
    (whole,) = survey(nn.Sequential(Block()), Measure(), frozenset({"Block"}), held).parts
    assert (whole.size, whole.held_bytes) == (100 + 111, 111)


def test_sizes_of_modules_are_summed_up_for_those_around_them() -> None:
    assert with_inner({"a.b": 2, "a.c": 3, "d": 4}) == {"a.b": 2, "a.c": 3, "a": 5, "d": 4, "": 9}
