"""Placing a model in several ways, with what it needs beside its weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.device_memory import get_balanced_memory
from accelerate_cpp.placement.first_fit import Room
from accelerate_cpp.placement.fitting import offloads
from accelerate_cpp.placement.map_plan import MapPlan, rooms_of
from accelerate_cpp.placement.workload import Workload


class Layer(nn.Module):
    """64 bytes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False)


def plan(layers: int = 4, **options: Any) -> MapPlan:
    workload = Workload(**options) if options else None
    return MapPlan(nn.Sequential(*(Layer() for _ in range(layers))), ["Layer"], None, None, workload, "a test")


def test_rooms_come_in_order_and_the_disk_at_last_without_an_end() -> None:
    assert rooms_of({1: 5, 2: 6, "disk": 7, "cpu": 8}) == [
        Room(1, 5, True),
        Room(2, 6),
        Room("cpu", 8, True),
        Room("disk", None),
    ]
    assert [room.reserving for room in rooms_of({"mps": 5, "cpu": 8})] == [True, False, False]


def test_accelerators_spare_what_activations_take_and_other_devices_do_not() -> None:
    assert plan(activation_bytes=30).spared({0: 100, 1: 20, "cpu": 50}) == {0: 70, 1: 0, "cpu": 50}
    assert plan().spared({0: 100, "cpu": 50}) == {0: 100, "cpu": 50}
    with pytest.raises(InvalidArgument, match=r"max_memory\[0\] is None"):
        plan().spared({0: None})  # type: ignore[dict-item]


def test_first_fit_fills_devices_with_layers_and_what_they_hold() -> None:
    memory = {0: 64 * 3, 1: 64 * 3, "cpu": 1000}
    assert plan().first_fit(memory).devices == {"0": 0, "1": 0, "2": 1, "3": 1}
    assert plan(class_bytes={"Layer": 32}).first_fit(memory).devices == {"0": 1, "1": 1, "2": "cpu", "3": "cpu"}


def test_what_offloaded_layers_hold_has_room_on_the_main_device() -> None:
    memory = {0: 64 * 4, "cpu": 10_000}
    # One of them is brought to device 0 at a time, beside three others.
    assert plan(6).first_fit(memory).used[0] == 3 * 64 + 64
    held = plan(6, class_bytes={"Layer": 16}).first_fit(memory)
    there = [name for name, device in held.devices.items() if device == 0]
    assert len(there) == 1
    assert len(there) * 80 + 80 + (6 - len(there)) * 16 <= memory[0] < 2 * 80 + 80 + 4 * 16


def test_without_accelerators_what_is_on_the_disk_runs_on_the_cpu() -> None:
    memory = {"cpu": 64 * 4}
    assert [*plan(6).first_fit(memory).devices.values()] == ["cpu"] * 3 + ["disk"] * 3
    held = plan(6, class_bytes={"Layer": 16}).first_fit(memory)
    assert [*held.devices.values()] == ["cpu"] + ["disk"] * 5


def test_a_fit_is_even_and_counts_what_is_held() -> None:
    memory = {0: 1000, 1: 1000}
    found = plan(5).fit(memory)
    assert found is not None
    assert sorted(found.used[gpu] for gpu in (0, 1)) == [128, 192]
    assert plan(4, class_bytes={"Layer": 36}).fit({0: 199, 1: 199}) is None
    assert plan(4, class_bytes={"Layer": 36}).fit({0: 200, 1: 200}) is not None


def test_a_fit_is_looked_for_only_instead_of_offloading() -> None:
    tight, wide = {0: 100, 1: 100, "cpu": 1000}, {0: 128, 1: 128, "cpu": 1000}
    some = plan()
    offloaded = some.first_fit(tight)
    assert offloads(offloaded)
    assert some.fit_instead(offloaded, tight) is offloaded
    found = some.fit_instead(offloaded, tight, wide)
    assert not offloads(found)
    assert some.fit_instead(found, wide) is found


def test_room_is_lowered_as_by_get_balanced_memory_with_what_is_held() -> None:
    model = nn.Sequential(*(Layer() for _ in range(6)))
    memory: dict[int | str, float] = {0: 1000, 1: 1000, 2: 1000, "cpu": 50}
    plain = MapPlan(model, ["Layer"], None, None, None, "a test")
    for low_zero in (False, True):
        expected = get_balanced_memory(model, memory, ["Layer"], low_zero=low_zero)  # type: ignore[arg-type]
        assert plain.lowered(memory, low_zero) == expected
    assert plan(6, class_bytes={"Layer": 64}).lowered(memory)[0] == 2 * plain.lowered(memory)[0]
    assert memory == {0: 1000, 1: 1000, 2: 1000, "cpu": 50}
