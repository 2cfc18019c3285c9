"""The coordinator of an elastic run: a thread of the launcher on the machine with the run's address."""

from __future__ import annotations

import math
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from types import TracebackType

from accelerate_cpp.launch.elastic.messages import COORDINATOR, Channel, Misunderstood, Unproved, text_in
from accelerate_cpp.launch.elastic.rounds import Rounds, Terms

PULSES = 5
"""How often both sides say that they are alive in the time after which one that says nothing is lost."""
_OTHER_VERSION = (
    "this launcher has another version of this package than the one that leads the run: install the same on all "
    "machines"
)
_LOOK_SECONDS = 0.2
STALL_SECONDS = 2.0
"""Who comes so much later than it wanted did not run meanwhile: it was stopped, or its machine slept."""
_GREETING_SECONDS = 10.0
_MOST_STRANGERS = 64
_FAREWELL_SECONDS = 10.0
_SEND_SECONDS = 5.0
_IPV4_IN_IPV6 = "::ffff:"


class _Connection:
    """Who has connected: a stranger until it has proved that it belongs to the run."""

    def __init__(self, connection: socket.socket, address: str, since: float) -> None:
        connection.settimeout(_SEND_SECONDS)  # of what is sent to it, as it is only read when something is there
        self.channel = Channel(connection)
        self.address = address
        self.since = since
        self.challenge = secrets.token_hex(32)
        self.is_known = False
        self.closes_at: float | None = None  # it has been told that the run goes on without it

    @property
    def takes_part(self) -> bool:
        """Whether it is a launcher of the run, and not one that was lost."""
        return self.is_known and self.closes_at is None


class Coordinator:
    """Accepts launchers at ``listener`` and leads them through the rounds of a run until it is over.

    Leaving the context gives the launchers some time to hear of the end.

    Args:
        address: of this machine, as the other launchers see it.
        secret: what launchers have to know; empty for none.
    """

    def __init__(self, listener: socket.socket, address: str, terms: Terms, secret: str = "") -> None:
        self._listener, self._address, self._secret = listener, address, secret
        self._rounds = Rounds(terms, time.monotonic())
        self._connections: dict[int, _Connection] = {}
        self._count = 0
        self._selector = selectors.DefaultSelector()
        self._is_closing, self._stop_at = False, math.inf
        self._pulse_seconds, self._next_pulse = terms.silence / PULSES, 0.0
        self._thread = threading.Thread(target=self._run, name="accelerate-cpp-coordinator", daemon=True)

    def __enter__(self) -> Coordinator:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closing = True
        self._thread.join()

    def _run(self) -> None:
        looked = time.monotonic()
        try:
            while not self._is_done():
                is_closing = self._is_closing  # what was said before is heard in this turn
                ready = self._selector.select(_LOOK_SECONDS)
                missed, looked = time.monotonic() - looked, time.monotonic()
                if missed > STALL_SECONDS:
                    self._rounds.excuse(missed)
                for key, _ in ready:
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                now = time.monotonic()
                for number, connection in list(self._connections.items()):
                    is_silent = not connection.is_known and now - connection.since > _GREETING_SECONDS
                    if is_silent or (connection.closes_at is not None and now >= connection.closes_at):
                        self._close(number)
                self._rounds.look(now)
                self._deliver()
                if is_closing and self._stop_at == math.inf:
                    self._stop_at = now + (_FAREWELL_SECONDS if self._rounds.is_over else 0)
                if now >= self._next_pulse:
                    self._next_pulse = now + self._pulse_seconds
                    for number in [number for number, one in self._connections.items() if one.takes_part]:
                        self._send(number, {"do": "alive"})
        finally:
            for number in list(self._connections):
                self._close(number, tell=False)
            self._selector.close()
            self._listener.close()

    def _is_done(self) -> bool:
        if self._stop_at == math.inf:
            return False
        return time.monotonic() >= self._stop_at or not any(one.takes_part for one in self._connections.values())

    def _accept(self) -> None:
        try:
            connection, (address, *_) = self._listener.accept()
        except OSError:  # it has gone again
            return
        strangers = {number: one.address for number, one in self._connections.items() if not one.is_known}
        if len(strangers) >= _MOST_STRANGERS:  # a launcher comes alone, and proves at once what it is
            ((crowded, _),) = Counter(strangers.values()).most_common(1)
            self._close(next(number for number, address in strangers.items() if address == crowded))
        self._count += 1
        stranger = _Connection(connection, address, time.monotonic())
        self._connections[self._count] = stranger
        self._selector.register(connection, selectors.EVENT_READ, self._count)
        self._send(self._count, {"do": "prove", "challenge": stranger.challenge})

    def _read(self, number: int) -> None:
        connection = self._connections.get(number)
        if connection is None:  # closed since it was selected
            return
        try:
            messages = connection.channel.read()
            if messages is None:
                self._close(number)
                return
            for message in messages:
                if connection.is_known:
                    self._rounds.hear(number, message, time.monotonic())
                elif not connection.channel.is_sealed and message.get("say") == "hello":  # as of older versions
                    self._refuse_other_version(number)
                    return
                elif not connection.channel.is_sealed:
                    challenges = connection.challenge, text_in(message, "challenge")
                    connection.channel.seal(self._secret, COORDINATOR, challenges)
                else:
                    try:
                        self._rounds.join(number, message, self._seen_address(connection), time.monotonic())
                    except Misunderstood:
                        self._refuse_other_version(number)
                        return
                    connection.is_known = True
        except Unproved:  # a launcher with another secret finds that of this message wrong, too, and says so
            self._send(number, {"do": "end", "status": 1, "reason": "it does not know the run's secret"})
            self._close(number)
        except (Misunderstood, OSError):
            self._close(number)

    def _refuse_other_version(self, number: int) -> None:
        self._send(number, {"do": "end", "status": 1, "reason": _OTHER_VERSION})
        self._close(number)

    def _seen_address(self, connection: _Connection) -> str:
        """Where the others find this launcher: one on this machine has come through an address of its own."""
        own = connection.channel.socket.getsockname()[0]
        seen = self._address if connection.address == own else connection.address
        return seen.removeprefix(_IPV4_IN_IPV6)

    def _deliver(self) -> None:
        while self._rounds.outbox:
            number, message = self._rounds.outbox.pop(0)
            self._send(number, message)
            connection = self._connections.get(number)
            if connection is not None and message["do"] == "end" and not self._rounds.is_over:
                connection.closes_at = time.monotonic() + _FAREWELL_SECONDS

    def _send(self, number: int, message: dict[str, object]) -> None:
        connection = self._connections.get(number)
        if connection is not None:
            try:
                connection.channel.send(message)
            except OSError:
                self._close(number)

    def _close(self, number: int, tell: bool = True) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:  # closed since
            return
        self._selector.unregister(connection.channel.socket)
        with suppress(OSError):
            connection.channel.socket.close()
        if tell and connection.is_known:
            self._rounds.lose(number, time.monotonic())
