"""How much room devices have, and how much of it a model may take."""

from __future__ import annotations

import logging
from typing import Any

import accelerate.utils as original
import pytest
import torch
from torch import nn

from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.table import Mps, kind_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement import device_memory
from accelerate_cpp.placement.device_memory import get_balanced_memory, get_max_memory, named_devices


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 5)


def model() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(6)), nn.Linear(10, 50))


def test_devices_come_in_order_and_texts_become_bytes() -> None:
    memory: dict[Any, Any] = {"disk": 7, "cpu": "1GB", 1: "2GiB", 0: 5}
    found = get_max_memory(memory)
    assert list(found.items()) == [(0, 5), (1, 2 << 30), ("cpu", 10**9), ("disk", 7)]
    assert get_max_memory({}) == {}


@pytest.mark.parametrize("name", ["mps", "xla"])
def test_what_maps_do_not_number_goes_by_its_name(name: str) -> None:
    assert name in named_devices()
    assert list(get_max_memory({"cpu": 7, name: "1KB"}).items()) == [(name, 1000), ("cpu", 7)]


@pytest.mark.parametrize("key", ["cuda:0", "foo", torch.device("cpu")])
def test_an_unknown_device_is_refused(key: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"max_memory has the key .*expected numbers of accelerators"):
        get_max_memory({key: 1})


def test_a_size_that_is_none_is_refused_with_its_device() -> None:
    with pytest.raises(InvalidArgument, match=r"max_memory\['cpu'\]='1XB'"):
        get_max_memory({"cpu": "1XB"})


def test_an_accelerator_that_is_not_there_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert get_max_memory({99: 1, -1: 2}) == {-1: 2, 99: 1}
    assert "not present: [-1, 99]" in caplog.text


class Gpus(Device):
    """GPUs of which each has more free memory than the one before."""

    def count(self) -> int:
        return 2

    def free_bytes(self, index: int) -> int:
        return 1000 * (index + 1)


class OneGpu(Gpus):
    def count(self) -> int:
        return 1


class AppleGpu(Mps):
    def count(self) -> int:
        return 1

    def free_bytes(self, index: int) -> int:
        return 77


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([], {"cpu": 77}),
        ([Gpus(type="cuda", title="GPU")], {0: 1000, 1: 2000, "cpu": 77}),
        ([AppleGpu(**vars(kind_of("mps")))], {"mps": 77}),
    ],
)
def test_without_a_wish_it_is_what_is_free_now(
    kinds: list[Device], expected: dict[Any, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "available_devices", lambda: kinds)
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 77)
    assert get_max_memory() == expected


def test_of_an_only_gpu_a_tenth_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "available_devices", lambda: [OneGpu(type="cuda", title="GPU")])
    monkeypatch.setattr(device_memory, "available_bytes", lambda: 77)
    assert get_balanced_memory(model()) == {0: 900, "cpu": 77}
    assert get_balanced_memory(model(), {0: 1000}) == {0: 1000}


MEMORIES: list[dict[Any, Any]] = [
    {"cpu": 100},
    {0: 10_000, "cpu": 100},
    {0: 10_000, 1: 10_000},
    {0: 10_000, 1: 10_000, 2: 10_000, "cpu": 99_999},
    {0: 300, 1: 10_000, 2: 10_000},
    {0: 0, 1: 10_000, 2: 10_000},
    {0: 10_000, 1: 100, 2: 10_000},
]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("low_zero", [False, True])
@pytest.mark.parametrize("whole", [None, "Block", ["Block", "Linear"], ["Nothing"]])
def test_balanced_room_is_that_of_the_original(memory: dict[Any, Any], low_zero: bool, whole: Any) -> None:
    logging.disable(logging.WARNING)
    try:
        for dtype in (None, torch.float16):
            options: dict[str, Any] = {"no_split_module_classes": whole, "dtype": dtype, "low_zero": low_zero}
            expected = original.get_balanced_memory(model(), dict(memory), **options)
            assert get_balanced_memory(model(), dict(memory), **options) == expected
    finally:
        logging.disable(logging.NOTSET)
