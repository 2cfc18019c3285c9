"""Which device a process trains on, with accelerators that are made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from accelerate_cpp.devices import selection
from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.selection import available_accelerators, select_device
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.errors import InvalidArgument

CPU = kind_of("cpu")


@dataclass(frozen=True, kw_only=True)
class Present(Device):
    """A kind of which there are some, that notes what becomes current."""

    number: int
    made_current: list[str] = field(default_factory=list, compare=False)

    def count(self) -> int:
        return self.number

    def set_current(self, index: int) -> None:
        self.made_current.append(f"{self.type}:{index}")

    def current(self) -> int:
        return 0


def show(monkeypatch: pytest.MonkeyPatch, *kinds: Present) -> None:
    monkeypatch.setattr(selection, "accelerators", lambda: kinds)
    monkeypatch.setattr(selection, "kind_of", lambda name: next((k for k in kinds if name.startswith(k.type)), CPU))


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were made current, on a host with two CUDA devices and one XPU."""
    made_current: list[str] = []
    kinds = {"cuda": 2, "xpu": 1}
    show(monkeypatch, *(Present(type=t, title=t, number=n, made_current=made_current) for t, n in kinds.items()))
    return made_current


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"cpu": False, "forced": None, "local_rank": 1}, "cuda:1"),
        ({"cpu": True, "forced": None, "local_rank": 1}, "cpu"),
        ({"cpu": False, "forced": "cpu", "local_rank": 1}, "cpu"),
        ({"cpu": True, "forced": "cuda:0", "local_rank": 1}, "cuda:0"),
        ({"cpu": False, "forced": "xpu:0", "local_rank": 1}, "xpu:0"),
        ({"cpu": False, "forced": "", "local_rank": 0}, "cuda:0"),
    ],
)
def test_the_users_choice_wins_then_the_cpu_then_the_local_rank(
    request_: dict[str, Any], expected: str, current: list[str]
) -> None:
    device = select_device(**request_)
    assert device == torch.device(expected)
    assert current == ([] if device.type == "cpu" else [str(device)])


@pytest.mark.usefixtures("current")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'cuda:2' is not present; this process sees cpu, 2 x cuda, 1 x xpu"):
        select_device(cpu=False, forced="cuda:2", local_rank=0)
    with pytest.raises(InvalidArgument, match="local rank 2 has no device: this host shows 2 of type cuda"):
        select_device(cpu=False, forced=None, local_rank=2)
    with pytest.raises(ValueError, match="'cuda:x' is not a device"):
        select_device(cpu=False, forced="cuda:x", local_rank=0)


def test_the_accelerators_are_those_that_are_there_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, *(Present(type=t, title=t, number=n) for t, n in {"npu": 4, "cuda": 0, "xpu": 1}.items()))
    assert available_accelerators() == [("npu", 4), ("xpu", 1)]


def test_where_a_process_has_a_device_of_its_own_its_rank_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    gaudis = Present(type="hpu", title="Gaudi", number=1, index_by_rank=False)
    show(monkeypatch, gaudis)
    assert select_device(cpu=False, forced=None, local_rank=3, world_size=4) == torch.device("hpu:0")


def test_several_processes_are_refused_where_torch_trains_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    apple = Present(type="mps", title="Apple GPU", number=1, index_by_rank=False, numbered=False, one_process=True)
    show(monkeypatch, apple)
    assert select_device(cpu=False, forced=None, local_rank=0) == torch.device("mps")
    for rank in range(2):
        with pytest.raises(InvalidArgument, match=r"2 processes on Apple GPU \(mps\).*launch --cpu"):
            select_device(cpu=False, forced=None, local_rank=rank, world_size=2)
    assert select_device(cpu=True, forced=None, local_rank=1, world_size=2) == torch.device("cpu")
