from __future__ import annotations

import pytest

from accelerate_cpp.placement.first_fit import Part, Placement, Room, place
from accelerate_cpp.placement.fitting import fit_on_accelerators, offloads


def _layers(*sizes: float) -> list[Part]:
    return [Part(f"layer{number}", size) for number, size in enumerate(sizes)]


def _rooms(*sizes: float) -> list[Room]:
    gpus = [Room(number, size, reserving=number == 0) for number, size in enumerate(sizes)]
    return [*gpus, Room("cpu", 10_000, reserving=True), Room("disk", None)]


def test_model_that_first_fit_offloads_is_kept_where_it_fits() -> None:
    parts, rooms = _layers(4, 4, 4), _rooms(8, 4)
    assert offloads(place(parts, rooms))
    found = fit_on_accelerators(parts, rooms)
    assert found is not None
    assert found.devices == {"layer0": 0, "layer1": 0, "layer2": 1}
    assert (found.used[0], found.used[1], offloads(found)) == (8, 4, False)


def test_order_is_given_up_before_anything_is_offloaded() -> None:
    found = fit_on_accelerators(_layers(2, 3, 2), _rooms(4, 3))
    assert found is not None
    assert found.devices == {"layer0": 0, "layer1": 1, "layer2": 0}


@pytest.mark.parametrize("rooms", [_rooms(4, 2), _rooms()])
def test_there_is_not_always_a_fit(rooms: list[Room]) -> None:
    assert fit_on_accelerators(_layers(2, 3, 2), rooms) is None


def test_out_of_order_large_blocks_stay_whole_where_they_fit() -> None:
    blocks = [
        Part(f"block{n}", size, [Part(f"block{n}.a", 1), Part(f"block{n}.b", size - 1)])
        for n, size in enumerate((3, 4, 3, 2))
    ]
    found = fit_on_accelerators(blocks, _rooms(6, 6))
    assert found is not None
    assert found.devices == {"block0": 1, "block1": 0, "block2": 1, "block3": 0}


def test_what_a_split_module_has_beside_its_parts_counts_with_the_first_of_them() -> None:
    block = Part("block", 9, [Part("block.first", 4), Part("block.second", 4)])  # and a buffer of one byte
    found = fit_on_accelerators([block], _rooms(5, 4))
    assert found is not None
    assert found.devices == {"block.first": 0, "block.second": 1}
    assert found.used == {0: 5, 1: 4, "cpu": 0, "disk": 0}
    assert fit_on_accelerators([block], _rooms(4, 4)) is None


def _halves(name: str, size: float) -> Part:
    return Part(name, size, [Part(f"{name}.a", size / 2), Part(f"{name}.b", size / 2)])


def test_loads_are_even_and_modules_whole_if_that_is_within_five_percent() -> None:
    found = fit_on_accelerators([_halves(f"layer{n}", 20) for n in range(20)], _rooms(1000, 1000, 1000))
    assert found is not None
    assert found.devices == {f"layer{n}": n // 7 for n in range(20)}
    assert [found.used[gpu] for gpu in range(3)] == [140, 140, 120]


def test_only_the_modules_are_split_that_have_to_be() -> None:
    found = fit_on_accelerators([Part("stack", 60, [_halves(f"stack.{n}", 20) for n in range(3)])], _rooms(100, 100))
    assert found is not None
    assert found.devices == {"stack.0": 0, "stack.1.a": 0, "stack.1.b": 1, "stack.2": 1}


def test_a_device_without_room_does_not_count() -> None:
    found = fit_on_accelerators(_layers(4, 4, 4, 4), [*_rooms(100, 0, 100)])
    assert found is not None
    assert found.devices == {"layer0": 0, "layer1": 0, "layer2": 2, "layer3": 2}


def test_parts_with_the_same_tensor_stay_together() -> None:
    parts = [Part("embedding", 4), *_layers(4, 4), Part("head", 2)]
    ties = [["embedding.weight", "head.weight"]]
    found = fit_on_accelerators(parts, _rooms(6, 8), ties)
    assert found is not None
    assert found.devices["embedding"] == found.devices["head"] == 0
    equal = [Part("embedding", 4), *_layers(3, 3), Part("head", 4)]
    assert fit_on_accelerators(equal, _rooms(7, 7)) is not None
    assert fit_on_accelerators(equal, _rooms(7, 7), ties) is None


def test_fractions_of_bytes_are_counted_whole() -> None:
    assert fit_on_accelerators(_layers(2.5, 2.5), _rooms(5)) is None
    assert fit_on_accelerators(_layers(2.5, 2.5), _rooms(6)) is not None


def test_buffers_are_counted_where_they_are() -> None:
    found = fit_on_accelerators([Part("norm", 4, buffer_bytes=3)], _rooms(4))
    assert isinstance(found, Placement)
    assert found.buffers[0] == 3
