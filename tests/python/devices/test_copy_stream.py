"""Copies beside computing, with a stand-in for torch.cuda that writes down what is asked of it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accelerate_cpp.devices.transfer import CopyStream


class Streams:
    """What CopyStream uses of torch.cuda; copies stay on the CPU."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.active = "computing"

    def Stream(self, device: torch.device) -> Any:
        return OneStream(self, "copies")

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.active = self.active, stream.name
        yield
        self.active = before

    def current_stream(self, device: torch.device) -> Any:
        return OneStream(self, self.active)


class OneStream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def record_event(self) -> str:
        self.streams.told.append(f"event on {self.name}")
        return f"end of {self.name}"

    def wait_event(self, event: str) -> None:
        self.streams.told.append(f"{self.name} waits for {event}")


def test_computing_waits_for_the_copy_and_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, kept = Streams(), []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: kept.append((tensor.shape, stream.name)))
    copies = CopyStream(torch.device("cpu"), streams)
    first = copies.begin({"a": torch.ones(2), "b": [torch.zeros(3), "text"]})
    second = copies.begin(torch.ones(4))
    assert streams.told == ["event on copies"] * 2
    batch = copies.end(first)
    assert torch.equal(batch["a"], torch.ones(2))
    assert batch["b"][1] == "text"
    assert kept == [((2,), "computing"), ((3,), "computing")]
    copies.end(second)
    assert streams.told[2:] == ["computing waits for end of copies"] * 2
