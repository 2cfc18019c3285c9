"""What the launchers of an elastic run and their coordinator say to each other: one line of JSON for each message.

A launcher proves first that it knows the secret of the run, if there is one (``ACCELERATE_CPP_RUN_SECRET``). Messages
hold numbers and names only: nothing that they say is executed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from collections.abc import Iterator
from typing import Any

from accelerate_cpp.errors import AccelerateError

Message = dict[str, Any]
MOST_BYTES = 64 * 1024
_CHUNK_BYTES = 4096


class Misunderstood(AccelerateError):
    """Who is at the other end of a connection does not speak as launchers do."""


class Channel:
    """A connected socket that carries messages. One thread may receive while others send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._unread = b""

    def send(self, message: Message) -> None:
        """Sends ``message``. ``OSError`` where the other end has gone."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[Message] | None:
        """The messages that have arrived, after one read; ``None`` when no more will come.

        Raises:
            Misunderstood: what has arrived is no message.
        """
        chunk = self.socket.recv(_CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        if len(self._unread) > MOST_BYTES:
            raise Misunderstood(f"expected lines of at most {MOST_BYTES} bytes, found more")
        return [_parsed(line) for line in lines]

    def messages(self) -> Iterator[Message]:
        """The messages, until the other end closes the connection."""
        while (found := self.read()) is not None:
            yield from found


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise Misunderstood(f"expected an object in JSON, found {line[:80]!r}")
    return message


def number_in(message: Message, name: str, least: int = 0, most: int = 2**31) -> int:
    """The number that ``message`` has under ``name``.

    Raises:
        Misunderstood: it has none, or one out of bounds.
    """
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise Misunderstood(f"{name!r}: expected a number from {least} to {most}, found {value!r:.80}")
    return value


def text_in(message: Message, name: str) -> str:
    """The text that ``message`` has under ``name``, on one line and not too long; :class:`Misunderstood` for none."""
    value = message.get(name)
    if not isinstance(value, str):
        raise Misunderstood(f"{name!r}: expected a text, found {value!r:.80}")
    return " ".join("".join(letter if letter.isprintable() else " " for letter in value[:500]).split())


def proof(secret: str, challenge: str) -> str:
    """What shows that one knows ``secret``, without saying it."""
    key = secret.encode(errors="surrogateescape")  # a variable of the environment may hold any bytes
    return hmac.new(key, challenge.encode(errors="replace"), hashlib.sha256).hexdigest()


def is_proof(secret: str, challenge: str, shown: object) -> bool:
    """Whether ``shown`` is the :func:`proof`."""
    return isinstance(shown, str) and shown.isascii() and hmac.compare_digest(proof(secret, challenge), shown)
