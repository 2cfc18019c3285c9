"""The accelerator that tests run on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import accelerate.test_utils.testing as original
import pytest
import torch

from accelerate_cpp.test_utils import backend


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets this machine have accelerators of a kind."""

    def put(kind: str) -> None:
        devices = SimpleNamespace(
            device_count=lambda: 3, memory_allocated=lambda: 17, current_allocated_memory=lambda: 18
        )
        monkeypatch.setattr(torch, kind, devices, raising=False)
        monkeypatch.setattr(backend, "available_device_type", lambda: kind)

    return put


def test_without_accelerator_there_is_one_device_without_memory() -> None:
    kind, count, allocated = backend.get_backend()
    assert (kind, count, allocated()) == ("cpu", 1, 0)
    assert (kind, count) == original.get_backend()[:2]
    assert (backend.torch_device, backend.device_count, backend.memory_allocated_func()) == ("cpu", 1, 0)


@pytest.mark.parametrize(("kind", "allocated"), [("cuda", 17), ("xpu", 17), ("npu", 17), ("mps", 18)])
def test_accelerators_count_themselves_and_their_memory(
    accelerator: Callable[[str], None], kind: str, allocated: int
) -> None:
    accelerator(kind)
    found, count, function = backend.get_backend()
    assert (found, count, function()) == (kind, 3, allocated)


def test_an_accelerator_that_does_not_count_its_memory_has_none(accelerator: Callable[[str], None]) -> None:
    accelerator("musa")
    del torch.musa.memory_allocated  # type: ignore[attr-defined]
    assert backend.get_backend()[2]() == 0


def test_torch_xla_is_asked_for_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "available_device_type", lambda: "xla")
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", SimpleNamespace(global_runtime_device_count=lambda: 8))
    kind, count, allocated = backend.get_backend()
    assert (kind, count, allocated()) == ("xla", 8, 0)
