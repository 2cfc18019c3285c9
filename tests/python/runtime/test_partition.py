"""The part of some inputs that each process works on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime.partition import part_of, rows_of_rank

CPU = torch.device("cpu")


def parts(inputs: Any, world_size: int, pad: bool = False) -> list[Any]:
    return [part_of(inputs, world_size, rank, CPU if pad else None) for rank in range(world_size)]


@given(length=st.integers(1, 50), world_size=st.integers(1, 8))
@example(length=2, world_size=4)
def test_parts_are_consecutive_complete_and_differ_by_at_most_one(length: int, world_size: int) -> None:
    rows = [rows_of_rank(length, world_size, rank) for rank in range(world_size)]
    assert [row for part in rows for row in part] == list(range(length))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_no_inputs_give_no_parts() -> None:
    assert parts([], 2) == [[], []]
    assert parts([], 2, pad=True) == [[], []]


def test_who_is_left_without_inputs_gets_none_as_with_the_original() -> None:
    assert parts(["only"], 3) == [["only"], [], []]
    assert parts(("only",), 2) == [("only",), ()]
    assert [part.shape for part in parts(torch.ones(1, 2), 2)] == [(1, 2), (0, 2)]
    assert parts(list(range(7)), 3, pad=True) == [[0, 1, 2], [3, 4, 6], [5, 6, 6]]


def test_the_first_ranks_take_what_does_not_divide() -> None:
    assert parts(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert parts((1, 2, 3), 2) == [(1, 2), (3,)]


@given(length=st.integers(1, 20), world_size=st.integers(1, 6))
def test_padded_parts_are_equally_long_and_end_in_the_last_item(length: int, world_size: int) -> None:
    padded = parts(list(range(length)), world_size, pad=True)
    assert len({len(part) for part in padded}) == 1
    assert {item for part in padded for item in part} == set(range(length))
    assert padded[-1][-1] == length - 1


def test_a_tensor_is_padded_with_its_last_row() -> None:
    assert [part.tolist() for part in parts(torch.arange(3), 2, pad=True)] == [[0, 1], [2, 2]]


def test_a_tuple_is_padded_on_no_rank() -> None:
    for rank in range(2):
        with pytest.raises(TypeError, match="tuple of 3 items for 2 processes"):
            part_of((1, 2, 3), 2, rank, CPU)
    assert parts((1, 2), 2, pad=True) == [(1,), (2,)]


def test_a_dict_is_split_in_place_value_by_value() -> None:
    inputs = {"a": [1, 2], "b": torch.tensor([3, 4])}
    assert part_of(inputs, 2, 1, None) is inputs
    assert inputs["a"] == [2]
    assert inputs["b"].tolist() == [4]  # type: ignore[attr-defined]


def test_the_values_of_a_dict_need_one_length() -> None:
    inputs = {"a": [1], "b": [1, 2]}
    with pytest.raises(InvalidArgument, match=r"\{'a': 1, 'b': 2\}"):
        part_of(inputs, 2, 0, None)
    assert inputs == {"a": [1], "b": [1, 2]}


def test_other_objects_are_returned_whole() -> None:
    assert part_of("text", 2, 1, None) == "text"
