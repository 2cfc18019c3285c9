"""The walk over nested batches: what is moved, what is kept, and what becomes of the containers."""

from __future__ import annotations

import gc
import sys
from collections import ChainMap, Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from accelerate_cpp.devices.transfer import send_to_device

pytestmark = pytest.mark.usefixtures("quick_collections")

# `meta` stands for the accelerator: moving there is possible everywhere.
META = torch.device("meta")
Point = namedtuple("Point", ["x", "y"])


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.ones(2, 3)


@dataclass
class Pair:
    data: Any
    name: str = "pair"


@dataclass(frozen=True)
class Frozen:
    data: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    data: Any


class Words(list[Any]):
    pass


class Mine(torch.Tensor):
    pass


class Batch:
    """Moves itself, as the outputs of tokenizers do."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def to(self, device: torch.device) -> Batch:
        self.calls.append((device,))
        return self


class EagerBatch(Batch):
    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        self.calls.append((device, non_blocking))
        return self


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": lambda leaf: [leaf, "text"],
    "tuple": lambda leaf: (leaf, 1),
    "named tuple": lambda leaf: Point(leaf, None),
    "subclass of list": lambda leaf: Words([leaf]),
    "dict": lambda leaf: {"a": leaf, 3: 4.0},
    "ordered dict": lambda leaf: OrderedDict([("b", leaf), ("a", b"bytes")]),
    "default dict": lambda leaf: defaultdict(list, a=leaf),
    "user dict": lambda leaf: UserDict(a=leaf),
    "chain map": lambda leaf: ChainMap({"a": leaf}),
    "mapping proxy": lambda leaf: MappingProxyType({"a": leaf}),
    "dataclass": Pair,
    "frozen dataclass": Frozen,
    "slotted dataclass": Slotted,
    "nested": lambda leaf: {"a": [Point(leaf, {"b": (leaf, Pair([leaf]))})]},
}


def leaves(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        yield from (leaf for item in tree for leaf in leaves(item))
    elif hasattr(tree, "items"):
        yield from (leaf for value in tree.values() for leaf in leaves(value))
    elif hasattr(tree, "data"):
        yield from leaves(tree.data)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_container_keeps_its_type_and_every_tensor_moves(container: str, tensor: torch.Tensor) -> None:
    tree = CONTAINERS[container](tensor)
    moved = send_to_device(tree, META)
    assert type(moved) is type(tree)
    assert [leaf.device for leaf in leaves(moved)] == [META] * len(list(leaves(tree)))
    assert [leaf.shape for leaf in leaves(moved)] == [leaf.shape for leaf in leaves(tree)]
    assert all(leaf is tensor for leaf in leaves(tree)), "the input has been changed"


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_tensor_on_the_device_already_is_the_same_object_afterwards(container: str, tensor: torch.Tensor) -> None:
    moved = send_to_device(CONTAINERS[container](tensor), "cpu")
    assert all(leaf is tensor for leaf in leaves(moved))


def test_order_keys_and_factories_are_kept(tensor: torch.Tensor) -> None:
    moved = send_to_device(OrderedDict([("b", tensor), ("a", 1)]), META)
    assert list(moved) == ["b", "a"]
    assert send_to_device(defaultdict(list, a=tensor), META).default_factory is list
    assert send_to_device({(1, 2): "x"}, META) == {(1, 2): "x"}
    assert send_to_device(Counter("aab"), META) == Counter("aab")
    assert send_to_device(Point(1, tensor), META).x == 1


@pytest.mark.parametrize(
    "leaf",
    [None, True, 3, 2.5, 1j, "text", b"bytes", {1, 2}, range(3), np.ones(2), object(), SimpleNamespace(a=1), Pair],
)
def test_what_holds_no_tensor_is_returned_as_it_is(leaf: object) -> None:
    assert send_to_device(leaf, META) is leaf
    assert send_to_device([leaf], META)[0] is leaf


def test_empty_containers_stay_what_they_are() -> None:
    assert send_to_device({}, META) == {}
    assert send_to_device([], META) == []
    assert send_to_device((), META) == ()


def test_moving_is_differentiable(tensor: torch.Tensor) -> None:
    assert send_to_device(tensor.requires_grad_(), META).requires_grad
    assert send_to_device(torch.nn.Parameter(torch.ones(2)), META).device == META


def test_a_subclass_of_tensor_stays_one(tensor: torch.Tensor) -> None:
    assert type(send_to_device([tensor.as_subclass(Mine)], META)[0]) is Mine
    packed = torch.nn.utils.rnn.pack_padded_sequence(tensor, [3, 2], batch_first=True)
    assert isinstance(send_to_device(packed, META), torch.nn.utils.rnn.PackedSequence)


def test_an_object_with_a_to_method_moves_itself() -> None:
    batch, eager = Batch(), EagerBatch()
    assert send_to_device([batch, eager], META) == [batch, eager]
    assert (batch.calls, eager.calls) == ([(META,)], [(META, False)])
    send_to_device({"a": batch, "b": eager}, META, non_blocking=True)
    assert (batch.calls[1:], eager.calls[1:]) == ([(META,)], [(META, True)])
    model = torch.nn.Linear(2, 2)
    assert send_to_device(model, META) is model
    assert model.weight.device == META


def test_an_error_of_a_to_method_or_a_mapping_reaches_the_caller() -> None:
    class Broken(UserDict[str, Any]):
        def items(self) -> Any:
            raise KeyError("no items today")

    class Unmovable:
        def to(self, device: torch.device, non_blocking: bool = False) -> None:
            raise ZeroDivisionError("cannot move")

    class Guarded:
        @property
        def to(self) -> None:
            raise OSError("do not look")

    for tree, error in ((Unmovable(), ZeroDivisionError), (Broken(a=1), KeyError), (Guarded(), OSError)):
        for non_blocking in (False, True):
            with pytest.raises(error):
                send_to_device({"a": [tree]}, META, non_blocking=non_blocking)


def test_an_error_of_torch_keeps_its_type_and_comes_without_stack_frames() -> None:
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as caught:
        send_to_device([torch.empty(2, device=META)], "cpu")
    assert "frame #" not in str(caught.value)


def test_a_tree_that_contains_itself_is_a_recursion_error(tensor: torch.Tensor) -> None:
    tree: list[Any] = [tensor]
    tree.append({"again": tree})
    with pytest.raises(RecursionError, match="while moving a nested batch to a device"):
        send_to_device(tree, META)
    deep: Any = tensor
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        send_to_device(deep, META)
    while isinstance(deep, list):
        deep = deep.pop()


@dataclass
class WithClassVariable:
    data: Any
    count: ClassVar[int] = 3


@dataclass(slots=True)
class SlottedWithClassVariable:
    data: Any
    count: ClassVar[int] = 3


@dataclass
class WithInitVariable:
    data: Any
    scale: InitVar[int]

    def __post_init__(self, scale: int) -> None:
        self.scaled = scale


@dataclass
class WithUnsetField:
    data: Any
    later: Any = field(init=False)


@pytest.mark.parametrize(
    "tree",
    [
        WithClassVariable(torch.ones(2)),
        SlottedWithClassVariable(torch.ones(2)),
        WithInitVariable(torch.ones(2), 3),
        WithUnsetField(torch.ones(2)),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_of_a_dataclass_only_fields_that_are_there_are_moved(tree: Any) -> None:
    moved = send_to_device(tree, META)
    assert type(moved) is type(tree)
    assert moved.data.device == META
    assert "count" not in getattr(moved, "__dict__", {})
    assert getattr(moved, "scaled", 3) == 3


def test_attributes_that_are_no_fields_come_along(tensor: torch.Tensor) -> None:
    pair = Pair(tensor)
    pair.extra = tensor  # type: ignore[attr-defined]
    assert send_to_device(pair, META).extra is tensor


@pytest.mark.parametrize("container", [*CONTAINERS, "error"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_references_do_not_leak(container: str, device: str) -> None:
    class Broken:
        def to(self, device: torch.device) -> None:
            raise ValueError

    leaf = torch.ones(2)
    tree = [leaf, {"a": Broken()}] if container == "error" else CONTAINERS[container](leaf)

    def rounds(count: int) -> tuple[int, int]:
        for _ in range(count):
            try:
                send_to_device(tree, device)
            except ValueError:
                continue
        gc.collect()
        return sys.getrefcount(leaf), sys.getallocatedblocks()

    references, blocks = rounds(1000)  # in which the interpreter fills its caches
    later_references, later_blocks = rounds(1000)
    assert later_references == references
    assert later_blocks - blocks < 1000, "one block or more per round stayed behind"
