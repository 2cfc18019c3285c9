from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from accelerate_cpp.comm.joining import BEGINS, GAVE_UP, JOINED, MESSAGE, announced_joining


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end to read from of the pipe that worker 3 is told of."""
    incoming, outgoing = os.pipe()
    os.set_blocking(incoming, False)
    monkeypatch.setenv("ACCELERATE_CPP_JOINING", f"{outgoing}:{os.fstat(outgoing).st_ino}:3")
    yield incoming
    os.close(incoming)
    os.close(outgoing)


def _messages(incoming: int) -> list[tuple[int, int]]:
    return [(worker, event) for worker, event in MESSAGE.iter_unpack(os.read(incoming, 1000))]


def test_beginning_and_end_are_announced(told: int) -> None:
    with announced_joining():
        assert _messages(told) == [(3, BEGINS)]
    assert _messages(told) == [(3, JOINED)]


def test_failure_is_announced(told: int) -> None:
    with pytest.raises(ZeroDivisionError), announced_joining():
        raise ZeroDivisionError
    assert _messages(told) == [(3, BEGINS), (3, GAVE_UP)]


def test_without_a_launcher_nothing_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_CPP_JOINING", raising=False)
    with announced_joining():
        pass


def test_descriptor_of_something_else_is_left_alone(told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    incoming, outgoing = os.pipe()
    monkeypatch.setenv("ACCELERATE_CPP_JOINING", f"{outgoing}:{os.fstat(told).st_ino}:3")
    with announced_joining():
        os.close(outgoing)
    assert os.read(incoming, 1000) == b""
    os.close(incoming)


def test_launcher_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    incoming, outgoing = os.pipe()
    os.close(incoming)
    monkeypatch.setenv("ACCELERATE_CPP_JOINING", f"{outgoing}:{os.fstat(outgoing).st_ino}:3")
    with announced_joining():
        pass
    os.close(outgoing)
