from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelerate_cpp.launch.fork.kernel_messages import Message, Messages, hand_over, kernel, sender


class Session:
    """Jupyter's session as far as it is used, which remembers what it sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        self.send: Callable[..., Any] = self._send

    def _send(self, stream: object, kind: str, content: Any, **others: Any) -> None:
        self.sent.append((stream, kind, content, others))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = types.SimpleNamespace(session=Session(), iopub_socket="socket", get_parent=lambda: {"cell": 3})
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=made)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return made


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_outside_of_a_notebook_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert kernel() is None
    assert sender() is None
    hand_over(None)


def test_messages_arrive_whole_however_they_are_cut(notebook: Any, pipe: tuple[int, int]) -> None:
    hand_over(pipe[1])
    notebook.session.send("stream", "comm_msg", {"data": 1}, ident=b"t", buffers=[memoryview(b"bb")], metadata={"m": 2})
    display = {"msg_type": "display_data", "content": {"data": {"text/plain": "x"}}, "metadata": {}}
    notebook.session.send("stream", display, ident=b"d")
    data = os.read(pipe[0], 1 << 16)
    seen: list[Message] = []
    take = Messages(seen.append)
    for byte in data:
        take(bytes([byte]))
    take(b"")
    assert seen == [
        Message("comm_msg", {"data": 1}, {"m": 2}, b"t", [b"bb"]),
        Message("display_data", {"data": {"text/plain": "x"}}, {}, b"d", []),
    ]


def test_only_what_a_cell_shows_is_handed_over(notebook: Any, pipe: tuple[int, int]) -> None:
    hand_over(pipe[1])
    notebook.session.send("stream", "status", {"execution_state": "busy"})
    os.set_blocking(pipe[0], False)
    with pytest.raises(BlockingIOError):
        os.read(pipe[0], 1)


def test_other_workers_leave_out_what_they_show(notebook: Any) -> None:
    hand_over(None)
    notebook.session.send("stream", "display_data", {})
    assert notebook.session.sent == []


def test_kernel_sends_a_message_for_the_cell_that_runs(notebook: Any) -> None:
    send = sender()
    assert send is not None
    send(Message("display_data", {"data": {}}, {"m": 1}, b"t", [b"b"]))
    told = {"parent": {"cell": 3}, "ident": b"t", "buffers": [b"b"], "metadata": {"m": 1}}
    assert notebook.session.sent == [("socket", "display_data", {"data": {}}, told)]
