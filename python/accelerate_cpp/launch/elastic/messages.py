"""What the launchers of an elastic run and their coordinator say to each other: one line of JSON for each message.

Both sides tell each other a challenge first. Each message after that has a seal that only those can make who know the
secret of the run (``ACCELERATE_CPP_RUN_SECRET``): it depends on both challenges, the sender and the place of the
message in the conversation, so none can be sent twice, back, or into another connection. Without a secret anyone can
make it.
Messages hold numbers and names only: nothing that they say is executed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from accelerate_cpp.errors import AccelerateError, InvalidArgument

Message = dict[str, Any]
MOST_BYTES = 64 * 1024
COORDINATOR, MEMBER = "coordinator", "member"
"""Who sends a message."""
_CHUNK_BYTES = 4096


class Misunderstood(AccelerateError):
    """Who is at the other end of a connection does not speak as launchers do."""


class Unproved(Misunderstood):
    """Who is at the other end of a connection has not shown that it knows the secret of the run."""


@lru_cache(maxsize=4)
def key_of(secret: str) -> bytes:
    """What seals are made with: a stranger who tries secrets against a seal that it was told needs long for each.

    Raises:
        InvalidArgument: there is a secret, and this Python cannot do that.
    """
    if not secret:
        return b""
    text = secret.encode(errors="surrogateescape")  # a variable of the environment may hold any bytes
    try:
        return hashlib.scrypt(text, salt=b"accelerate-cpp run", n=2**14, r=8, p=1)
    except (AttributeError, ValueError) as error:  # built without OpenSSL, or with FIPS alone
        raise InvalidArgument(
            f"ACCELERATE_CPP_RUN_SECRET needs scrypt, which this Python does not have ({error}): use a Python with "
            "OpenSSL's usual algorithms, or a network that strangers do not reach, without the variable"
        ) from error


class _Seals:
    """The seals of one direction of a connection."""

    def __init__(self, secret: str, sender: str, challenges: tuple[str, str]) -> None:
        self._key = key_of(secret)
        self._sender, self._challenges, self._count = sender, challenges, 0

    def next(self, text: bytes) -> bytes:
        """The seal of the next message."""
        place = json.dumps([self._sender, *self._challenges, self._count])
        self._count += 1
        return hmac.new(self._key, place.encode() + b"\n" + text, hashlib.sha256).hexdigest().encode()


class Channel:
    """A connected socket that carries messages. One thread may receive while others send."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._unread = b""
        self._sent: _Seals | None = None
        self._received: _Seals | None = None

    @property
    def is_sealed(self) -> bool:
        """Whether messages have seals by now."""
        return self._sent is not None

    def seal(self, secret: str, here: str, challenges: tuple[str, str]) -> None:
        """From now on, messages of both directions have seals.

        Args:
            here: who uses this end: :data:`COORDINATOR` or :data:`MEMBER`.
            challenges: of the coordinator and of the member.
        """
        there = MEMBER if here == COORDINATOR else COORDINATOR
        self._received, self._sent = _Seals(secret, there, challenges), _Seals(secret, here, challenges)

    def send(self, message: Message) -> None:
        """Sends ``message``. ``OSError`` where the other end has gone."""
        text = json.dumps(message).encode()
        self.socket.sendall((text if self._sent is None else self._sent.next(text) + b" " + text) + b"\n")

    def read(self) -> Iterator[Message] | None:
        """The messages that have arrived, after one read; ``None`` when no more will come.

        Each is looked at when it is taken, as the one before it may have led to :meth:`seal`.

        Raises:
            Misunderstood: what has arrived is no message; :class:`Unproved` if it lacks its seal.
        """
        chunk = self.socket.recv(_CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        if len(self._unread) > MOST_BYTES:
            raise Misunderstood(f"expected lines of at most {MOST_BYTES} bytes, found more")
        return (_parsed(self._opened(line)) for line in lines)

    def _opened(self, line: bytes) -> bytes:
        if self._received is None:
            return line
        shown, _, text = line.partition(b" ")
        if not hmac.compare_digest(shown, self._received.next(text)):
            raise Unproved(f"expected a message with the seal of the run's secret, found {line[:80]!r}")
        return text


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
