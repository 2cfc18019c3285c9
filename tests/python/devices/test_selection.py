"""Which device a process trains on, with accelerators that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_cpp.devices import selection
from accelerate_cpp.devices.selection import available_accelerators, select_device
from accelerate_cpp.errors import InvalidArgument


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that were made current, on a host with two CUDA devices and one XPU."""
    made_current: list[torch.device] = []
    monkeypatch.setattr(selection, "available_accelerators", lambda: [("cuda", 2), ("xpu", 1)])
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "set_device", made_current.append)
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
    request_: dict[str, Any], expected: str, current: list[torch.device]
) -> None:
    device = select_device(**request_)
    assert device == torch.device(expected)
    assert current == ([] if device.type == "cpu" else [device])


@pytest.mark.usefixtures("current")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'cuda:2' is not present; this process sees cpu, 2 x cuda, 1 x xpu"):
        select_device(cpu=False, forced="cuda:2", local_rank=0)
    with pytest.raises(InvalidArgument, match="local rank 2 has no device: this host shows 2 of type cuda"):
        select_device(cpu=False, forced=None, local_rank=2)
    with pytest.raises(ValueError, match="'cuda:x' is not a device"):
        select_device(cpu=False, forced="cuda:x", local_rank=0)


def test_the_accelerators_are_those_that_torch_can_use_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(available: bool, count: int) -> SimpleNamespace:
        return SimpleNamespace(is_available=lambda: available, device_count=lambda: count)

    monkeypatch.setattr(torch, "mps", module(True, 1))
    monkeypatch.setattr(torch, "xpu", module(False, 1))
    monkeypatch.setattr(torch, "cuda", module(True, 4))
    assert available_accelerators() == [("cuda", 4), ("mps", 1)]
    monkeypatch.delattr(torch, "cuda")
    assert available_accelerators() == [("mps", 1)]
