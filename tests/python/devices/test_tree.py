"""Walks over nested data. (utils/test_operations.py tests the same functions under their drop-in names.)"""

from __future__ import annotations

from collections import OrderedDict, namedtuple

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
