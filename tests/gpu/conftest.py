"""Tests for machines with a CUDA device and a CUDA build of torch; they are skipped elsewhere."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
PATIENCE_SECONDS = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fresh_state(fresh_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds the state of an ``Accelerator`` of the test before, or the name of a device.

    Operations of cuDNN take their algorithm from the shapes alone, so that a program gives the same bits each time.
    """
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


class Gate:
    """Holds back what a stream is asked to do from now on, until the host opens the gate.

    The stream waits for a number in pinned memory (``cuStreamWaitValue32``), which only the host writes.
    """

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._number = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def close(self, stream: torch.cuda.Stream) -> None:
        """What ``stream`` is asked to do after this call begins when :meth:`open` has been called."""
        at_least, address = 0, ctypes.c_uint64(self._number.data_ptr())
        status = self._driver.cuStreamWaitValue32_v2(
            ctypes.c_void_p(stream.cuda_stream), address, ctypes.c_uint32(1), ctypes.c_uint(at_least)
        )
        assert status == 0, f"cuStreamWaitValue32: CUresult {status}"

    def open(self) -> None:
        self._number.fill_(1)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()
    torch.cuda.synchronize()


@pytest.fixture
def happens() -> Callable[[torch.cuda.Event], bool]:
    """Whether an event has come, or comes within a minute."""

    def happens(event: torch.cuda.Event) -> bool:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not event.query():
            if time.monotonic() > deadline:
                return False
        return True

    return happens
