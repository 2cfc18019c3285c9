"""Walks over nested data. (utils/test_operations.py tests the same functions under their drop-in names.)"""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch

from accelerate_cpp.devices import tree

Pair = namedtuple("Pair", "first second")


def test_every_tensor_is_replaced_and_every_container_kept() -> None:
    data = OrderedDict(a=[torch.ones(1), "text"], b=Pair(torch.ones(1), (torch.ones(1), None)))
    doubled = tree.recursively_apply(lambda tensor: tensor * 2, data)
    assert type(doubled) is OrderedDict
    assert type(doubled["b"]) is Pair
    assert (doubled["a"][0].item(), doubled["a"][1]) == (2.0, "text")
    assert (doubled["b"].second[0].item(), doubled["b"].second[1]) == (2.0, None)


def test_a_namedtuple_is_told_from_a_tuple() -> None:
    assert tree.is_namedtuple(Pair(1, 2))
    assert not tree.is_namedtuple((1, 2))
    assert tree.honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)
    assert tree.is_torch_tensor(torch.ones(1))


def test_a_mapping_that_needs_more_than_its_entries_is_rebuilt() -> None:
    counted = defaultdict(list, a=torch.ones(1))
    doubled = tree.recursively_apply(lambda tensor: tensor * 2, counted)
    assert (type(doubled), doubled.default_factory, doubled["a"].item()) == (defaultdict, list, 2.0)
    wrapped = tree.recursively_apply(lambda tensor: tensor * 2, UserDict(a=torch.ones(1)))
    assert (type(wrapped), wrapped["a"].item()) == (UserDict, 2.0)


def test_leaves_come_in_the_order_of_the_walk() -> None:
    data = {"b": [1, (2, {"x": 3})], "a": Pair(4, []), "c": None}
    visited: list[int | None] = []
    tree.recursively_apply(visited.append, data, test_type=lambda _: True)
    assert list(tree.leaves_of(data)) == visited == [1, 2, 3, 4, None]


def test_all_tensors_are_replaced_in_one_call() -> None:
    data = Pair([torch.ones(1)], {"x": torch.ones(2)})
    calls: list[int] = []

    def lengths(tensors: list[torch.Tensor]) -> list[int]:
        calls.append(len(tensors))
        return [len(tensor) for tensor in tensors]

    assert tree.apply_to_all(lengths, data, "measure") == Pair([1], {"x": 2})
    assert calls == [2]
    with pytest.raises(TypeError, match=r"Unsupported types \(<class 'str'>\) passed to `measure`: it takes tensors"):
        tree.apply_to_all(lengths, [torch.ones(1), "text"], "measure")
