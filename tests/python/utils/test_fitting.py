from __future__ import annotations

import pytest

from accelerate_cpp.utils.fitting import fit_on_accelerators, offloads
from accelerate_cpp.utils.placement import Part, Placement, Room, place


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


def test_parts_of_parts_are_shared_out_and_what_follows_its_module_has_room_everywhere() -> None:
    block = Part("block", 9, [Part("block.first", 4), Part("block.second", 4)])  # and a buffer of one byte
    found = fit_on_accelerators([block], _rooms(5, 5))
    assert found is not None
    assert found.devices == {"block.first": 0, "block.second": 1}
    assert fit_on_accelerators([block], _rooms(5, 4)) is None


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
