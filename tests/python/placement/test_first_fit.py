"""The decision which part of a model goes to which device, on plain names and sizes."""

from __future__ import annotations

import pytest

from accelerate_cpp.placement.first_fit import Part, Room, device_of, is_in_one_of, place


def layer(name: str, size: float) -> Part:
    return Part(name, size)


def block(name: str, *parts: Part) -> Part:
    return Part(name, sum(part.size for part in parts), list(parts))


DISK = Room("disk", None)


def test_devices_are_filled_in_order_and_the_rest_goes_to_the_last() -> None:
    parts = [layer("a", 4), layer("b", 4), layer("c", 4), layer("d", 4)]
    result = place(parts, [Room(0, 4), Room(1, 9), DISK])
    assert result.devices == {"a": 0, "b": 1, "c": 1, "d": "disk"}
    assert result.used == {0: 4, 1: 8, "disk": 4}


def test_a_device_is_never_returned_to() -> None:
    parts = [layer("a", 4), layer("b", 9), layer("c", 1)]
    assert place(parts, [Room(0, 5), DISK]).devices == {"a": 0, "b": "disk", "c": "disk"}


def test_a_reserving_device_keeps_room_for_the_largest_layer_to_come() -> None:
    parts = [layer("a", 4), layer("b", 4), layer("c", 6)]
    assert place(parts, [Room(0, 9, reserving=True), DISK]).devices == {"a": "disk", "b": "disk", "c": "disk"}
    assert place(parts, [Room(0, 10, reserving=True), DISK]).devices == {"a": 0, "b": "disk", "c": "disk"}
    assert place(parts, [Room(0, 14, reserving=True), DISK]).devices == {"a": 0, "b": 0, "c": 0}


def test_what_does_not_fit_is_split_as_far_as_it_has_parts() -> None:
    parts = [block("a", block("a.x", layer("a.x.p", 3), layer("a.x.q", 3)), layer("a.y", 3))]
    result = place(parts, [Room(0, 4), Room(1, 3), DISK])
    assert result.devices == {"a.x.p": 0, "a.x.q": 1, "a.y": "disk"}


def test_parts_that_share_a_tensor_go_together_out_of_order_and_it_counts_once() -> None:
    parts = [layer("a", 4), layer("b", 8), layer("c", 0)]
    result = place(parts, [Room(0, 4), DISK], ties=[["a.w", "c.w"]], sizes={"a.w": 4})
    assert result.devices == {"a": 0, "c": 0, "b": "disk"}


def test_a_part_that_shares_a_tensor_is_split_to_let_the_other_half_go_elsewhere() -> None:
    parts = [layer("a", 4), block("b", layer("b.x", 0), layer("b.y", 4))]
    result = place(parts, [Room(0, 4), DISK], ties=[["a.w", "b.x.w"]], sizes={"a.w": 4})
    assert result.devices == {"a": 0, "b.x": 0, "b.y": "disk"}


def test_names_that_begin_alike_are_not_taken_for_each_other() -> None:
    parts = [layer("a", 4), layer("aa", 4), layer("b", 8), layer("c", 0)]
    result = place(parts, [Room(0, 8), DISK], ties=[["aa.w", "c.w"]], sizes={"aa.w": 4})
    assert result.devices == {"a": 0, "aa": 0, "c": 0, "b": "disk"}


def test_a_shared_tensor_beside_modules_is_found() -> None:
    parts = [layer("a", 4), Part("w", 0, is_module=False), layer("b", 4)]
    result = place(parts, [Room(0, 4), DISK], ties=[["a.w", "w"]], sizes={"a.w": 4})
    assert result.devices == {"a": 0, "w": 0, "b": "disk"}


def test_a_device_that_is_too_small_for_the_next_part_stays_empty_and_says_what_it_would_need() -> None:
    parts = [layer("a", 8), layer("b", 2)]
    result = place(parts, [Room(0, 3), DISK])
    assert (result.devices, result.needed) == ({"a": "disk", "b": "disk"}, {0: 8})


def test_with_fallback_it_gets_the_first_part_that_fits_beside_the_one_that_did_not() -> None:
    parts = [layer("a", 8), block("b", layer("b.x", 6), layer("b.y", 2)), layer("c", 8)]
    rooms = [Room(0, 11, reserving=True), DISK]
    assert place(parts, rooms).devices == {"a": "disk", "b": "disk", "c": "disk"}
    assert place(parts, rooms, fallback=True).devices == {"b.y": 0, "a": "disk", "b.x": "disk", "c": "disk"}


def test_with_fallback_a_device_for_which_nothing_fits_stays_empty() -> None:
    parts = [layer("a", 8), layer("b", 4)]
    assert place(parts, [Room(0, 9, reserving=True), DISK], fallback=True).devices == {"a": "disk", "b": "disk"}


def test_with_fallback_parts_that_share_tensors_are_looked_at_together() -> None:
    parts = [layer("a", 64), block("b", layer("b.x", 48), layer("b.y", 24), layer("b.z", 8))]
    result = place(parts, [Room("cpu", 109, reserving=True), DISK], [["b.y.w", "b.z.w"]], {"b.y.w": 16}, fallback=True)
    assert result.devices == {"b.y": "cpu", "b.z": "cpu", "a": "disk", "b.x": "disk"}


def test_buffers_are_counted_by_device() -> None:
    parts = [Part("a", 4, buffer_bytes=1), Part("b", 4, buffer_bytes=3)]
    assert place(parts, [Room(0, 4), DISK]).buffers == {0: 1, "disk": 3}


def test_decisions_are_told() -> None:
    told: list[str] = []
    place([block("a", layer("a.x", 4), layer("a.y", 4))], [Room(0, 4), DISK], tell=told.append)
    assert [line.split(":")[0] for line in told] == ["a", "a.x", "a.y", "a.y"]
    assert "split" in told[0]
    assert told[1].endswith("to 0")


def test_time_grows_with_the_number_of_parts_and_not_with_its_square() -> None:
    looked_at = 0

    class Counting(Part):
        def __getattribute__(self, name: str) -> object:
            nonlocal looked_at
            looked_at += name == "size"
            return super().__getattribute__(name)

    counts = []
    for number in (200, 2000):
        looked_at = 0
        parts: list[Part] = [Counting(f"layer{index}", 1) for index in range(number)]
        place(parts, [Room(0, number // 3, reserving=True), Room(1, number // 3), DISK])
        counts.append(looked_at)
    assert counts[1] <= 11 * counts[0]


def test_the_device_of_a_part_is_that_of_the_smallest_part_around_it() -> None:
    devices = {"": "disk", "a": 0, "a.b": 1}
    names = ["a.b.w", "a.b", "a.c", "ab", "", "x.y"]
    assert [device_of(devices, name) for name in names] == [1, 1, 0, "disk", "disk", "disk"]
    assert device_of({"a": 0}, "b") is None


@pytest.mark.parametrize(
    ("name", "modules", "expected"),
    [
        ("body.0", ["body"], True),
        ("body.0", ["0"], True),
        ("body.0.weight", ["body.0"], True),
        ("body.0", ["bod", "ody", "body.0.weight"], False),
        ("body.0", [], False),
    ],
)
def test_names_of_modules_are_whole(name: str, modules: list[str], expected: bool) -> None:
    assert is_in_one_of(name, modules) is expected
