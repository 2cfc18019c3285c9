"""send_to_device: devices, keys to skip, and the same object where nothing moves."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from accelerate_cpp.devices.transfer import send_to_device


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_a_device_may_be_a_name(device: Any) -> None:
    assert send_to_device(torch.ones(2), device).device == torch.device("meta")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        send_to_device(torch.ones(2), "nonsense")


@pytest.mark.parametrize("skip_keys", ["keep", ["keep"], ("keep", "other"), {"keep"}])
def test_skipped_keys_stay_at_every_depth(skip_keys: Any) -> None:
    tree = {"keep": torch.ones(1), "move": [{"keep": [torch.ones(2)], "move": torch.ones(3)}]}
    moved = send_to_device(tree, "meta", skip_keys=skip_keys)
    assert moved["keep"] is tree["keep"]
    assert moved["move"][0]["keep"] is tree["move"][0]["keep"]
    assert moved["move"][0]["move"].device.type == "meta"


def test_keys_to_skip_need_not_be_text() -> None:
    tree = {1: torch.ones(1), "1": torch.ones(1), (2, 3): torch.ones(1)}
    moved = send_to_device(tree, "meta", skip_keys=[1, (2, 3)])  # type: ignore[list-item]
    assert [value.device.type for value in moved.values()] == ["cpu", "meta", "cpu"]


def test_a_key_to_skip_is_a_whole_key() -> None:
    moved = send_to_device({"keeper": torch.ones(1), "k": torch.ones(1)}, "meta", skip_keys="keep")
    assert [value.device.type for value in moved.values()] == ["meta", "meta"]


def test_a_tensor_that_is_there_already_is_the_same_object() -> None:
    tensor, text = torch.ones(2), "text"
    assert send_to_device(tensor, "cpu") is tensor
    assert send_to_device(text, "meta") is text


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclass
class Record:
    values: torch.Tensor
    name: str


TREES = {
    "dict": {"x": torch.ones(2), "keep": torch.ones(3)},
    "ordered": OrderedDict(x=torch.ones(2), keep=torch.ones(3)),
    "default": defaultdict(list, x=[torch.ones(2)], keep=[torch.ones(3)]),
    "nested": [(torch.ones(1), {"keep": torch.ones(2)}), [torch.ones(3), "text", 4, None]],
    "namedtuple": Pair(torch.ones(2), [torch.ones(1)]),
    "dataclass": Record(torch.ones(2), "name"),
}


def description(tree: Any) -> Any:
    """Types of the containers, devices and shapes of the tensors."""
    if isinstance(tree, torch.Tensor):
        return tree.device.type, tuple(tree.shape)
    if isinstance(tree, Record):
        return Record, description(tree.values), tree.name
    if isinstance(tree, dict):
        return type(tree), {key: description(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree), [description(value) for value in tree]
    return tree


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_torch_compile_goes_through_it_in_one_graph(tree: Any, non_blocking: bool) -> None:
    def moving(data: Any) -> Any:
        return send_to_device(data, "meta", non_blocking=non_blocking, skip_keys="keep")

    torch.compiler.reset()  # it gives up after eight versions of one function
    compiled = torch.compile(moving, backend="eager", fullgraph=True)
    assert description(compiled(tree)) == description(moving(tree))
