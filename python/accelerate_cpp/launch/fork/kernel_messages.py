"""What a forked worker shows by IPython: figures, displays and widgets such as progress bars.

They are messages to the notebook, which only the kernel's own process may send. So the worker with rank 0 hands its
messages to the kernel, which sends them as if the cell had shown them itself. Those of other workers are left out, as
they would be the same.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from accelerate_cpp.launch.view.notebook_cells import shell

_KINDS = frozenset(
    {"display_data", "update_display_data", "clear_output", "comm_open", "comm_msg", "comm_close", "execute_result"}
)
_LENGTH = struct.Struct("=Q")


class Message(NamedTuple):
    """A message as Jupyter's protocol has it, without what belongs to one session; ``buffers`` are binary parts."""

    kind: str
    content: dict[str, Any]
    metadata: dict[str, Any]
    ident: bytes | list[bytes] | None
    buffers: list[bytes]


def kernel() -> Any:
    """The kernel of this process, or of the process that it is a fork of; ``None`` if that is no notebook."""
    return getattr(shell(), "kernel", None)


def hand_over(descriptor: int | None) -> None:
    """From here on, what this fork of a kernel shows is written to ``descriptor``; ``None``: it is left out."""
    of_parent = kernel()
    if of_parent is None:
        return
    lock = threading.Lock()

    def send(
        stream: object,
        msg_or_type: dict[str, Any] | str,
        content: dict[str, Any] | None = None,
        parent: object = None,
        ident: bytes | list[bytes] | None = None,
        buffers: Sequence[Any] | None = None,
        track: bool = False,
        header: object = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        if isinstance(msg_or_type, dict):
            kind, content, metadata = (msg_or_type[name] for name in ("msg_type", "content", "metadata"))
            buffers = buffers or msg_or_type.get("buffers")
        else:
            kind = msg_or_type
        if descriptor is None or kind not in _KINDS:
            return
        parts = [bytes(memoryview(part)) for part in buffers or ()]
        message = pickle.dumps(Message(kind, content or {}, metadata or {}, ident, parts))
        with lock:
            _write_whole(descriptor, _LENGTH.pack(len(message)) + message)

    of_parent.session.send = send


def _write_whole(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class Messages:
    """The parent's side: takes the bytes that :func:`hand_over` writes, and hands each whole message to ``send``."""

    def __init__(self, send: Callable[[Message], object]) -> None:
        self._send = send
        self._bytes = bytearray()

    def __call__(self, chunk: bytes) -> None:
        self._bytes += chunk
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            message = pickle.loads(memoryview(self._bytes)[_LENGTH.size : end])
            del self._bytes[:end]
            self._send(Message(*message))


def sender() -> Callable[[Message], object] | None:
    """What sends messages to the notebook, for the cell that runs; ``None`` where there is none."""
    own = kernel()
    if own is None:
        return None

    def send(message: Message) -> None:
        own.session.send(
            own.iopub_socket,
            message.kind,
            message.content,
            parent=own.get_parent(),
            ident=message.ident,
            buffers=message.buffers,
            metadata=message.metadata,
        )

    return send
