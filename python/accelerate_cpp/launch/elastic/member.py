"""A launcher's connection with the coordinator of an elastic run."""

from __future__ import annotations

import os
import queue
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.elastic.coordinator import PULSES, STALL_SECONDS
from accelerate_cpp.launch.elastic.messages import MEMBER, Channel, Message, Misunderstood, Unproved, number_in, text_in
from accelerate_cpp.launch.elastic.rounds import Terms
from accelerate_cpp.launch.plan.host_resources import free_port
from accelerate_cpp.launch.workers.signals import FORWARDED, INTERRUPTS
from accelerate_cpp.runtime.preemption import REQUEUE

RETRY_SECONDS = 0.2
"""How long who cannot reach the launcher that leads the run waits until it tries again."""
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Start:
    """A round begins: the place of this launcher in it, and where the store of its rank 0 is."""

    round: int
    rank: int
    count: int
    address: str
    port: int


@dataclass(frozen=True)
class Wait:
    """The run goes on without this launcher for now."""

    reason: str


@dataclass(frozen=True)
class End:
    """The run has ended for all."""

    status: int
    reason: str


@dataclass(frozen=True)
class Interrupted:
    """This launcher got a signal."""

    number: int


class Member:
    """Tells the coordinator how this launcher's rounds end, and is told when they begin and have to end.

    A thread reads what the coordinator says, and obeys only one that knows the secret of the run. Each :meth:`begin`
    makes a descriptor whose end says that its round has to end.

    Args:
        order: launchers are numbered by it, those with the same one in the order in which they came.
        signals: delivers a byte for each signal to this process.
    """

    def __init__(self, address: str, port: int, terms: Terms, signals: socket.socket, order: int, secret: str) -> None:
        self._place, self._terms, self._signals = (address, port), terms, signals
        self._order, self._secret = order, secret
        self._orders: queue.SimpleQueue[Start | Wait | End] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = os.pipe()
        self._lock = threading.Lock()
        self._round = 0
        self._is_over = False
        self.has_lost_input = False
        """Whether the standard input of this launcher has ended, and it has to end, as by SIGTERM."""
        self._is_led = False  # the coordinator has taken this launcher into the run
        self._stop_writer: int | None = None
        self.stop_reason: str | None = None
        """Why the round in progress has to end, if it has to; empty where a failure of its own has told."""
        self.can_save = True
        """Whether the workers of the round in progress can save together before they end: none of them is gone."""

    def __enter__(self) -> Member:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if hasattr(self, "_channel"):
            self._closed.set()
            with suppress(OSError):
                self._channel.socket.shutdown(socket.SHUT_RDWR)
            self._reader.join()
            self._pulse.join()
            self._channel.socket.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def connect(self) -> Interrupted | None:
        """Reaches the coordinator, which may start later than this launcher.

        Returns:
            The signal that ended the attempts, if one came.

        Raises:
            InvalidArgument: nobody listens there in the time that the run waits for launchers.
        """
        self._deadline = time.monotonic() + self._terms.join
        while True:
            try:
                connection = socket.create_connection(self._place, timeout=_CONNECT_SECONDS)
                break
            except OSError as error:
                if time.monotonic() > self._deadline:
                    address, port = self._place
                    raise InvalidArgument(
                        f"no launcher of the run listens at {address}, port {port} ({error}); start the one of that "
                        "machine, or check --main_process_ip and --main_process_port"
                    ) from None
            if (interrupted := self._interrupt(RETRY_SECONDS)) is not None:
                return interrupted
        self._channel = self._channel_of(connection)
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name="accelerate-cpp-member", daemon=True)
        self._pulse = threading.Thread(target=self._say_alive, name="accelerate-cpp-pulse", daemon=True)
        self._reader.start()
        self._pulse.start()
        return None

    def _channel_of(self, connection: socket.socket) -> Channel:
        connection.settimeout(self._terms.silence)
        return Channel(connection)

    def next_order(self) -> Start | Wait | End | Interrupted:
        """Waits for the next round, word that it takes longer, the end of the run, or a signal."""
        while True:
            with suppress(queue.Empty):
                return self._orders.get_nowait()
            if (interrupted := self._interrupt(None)) is not None:
                return interrupted

    def begin(self, start: Start) -> int:
        """The round begins here; returns the descriptor that ends when the round has to, which the caller closes."""
        reader, writer = os.pipe()
        with self._lock:
            self._stop_writer = writer
            if self._round != start.round and not self._is_over:
                self._round, self.stop_reason, self.can_save = start.round, None, True
            elif self.stop_reason is not None:  # it has been stopped already
                self._close_stop_writer()
            if self.has_lost_input:
                self._close_stop_writer()
        return reader

    def ended(self, start: Start, status: int, sentence: str, is_cause: bool = False, has_saved: bool = False) -> None:
        """The workers of the round have ended by themselves, or, if it had to end, because of that.

        Args:
            is_cause: one of them failed by itself, also if the round had to end meanwhile.
            has_saved: they have saved the state of the run and left.
        """
        with self._lock:
            self._close_stop_writer()
            was_stopped = self._round == start.round and self.stop_reason is not None
        if was_stopped and not is_cause:
            self._say({"say": "stopped", "round": start.round, "has_saved": has_saved, "status": status})
            return
        told = {"status": status, "sentence": sentence, "is_cause": is_cause, "has_saved": has_saved}
        self._say({"say": "ended", "round": start.round, **told})

    def lose_input(self) -> None:
        """Ends this launcher as SIGTERM does. The first signal after that asks for nothing else."""
        with self._lock:
            self.has_lost_input = True
            self._close_stop_writer()
        os.write(self._wake_writer, b"\0")

    def leaves(self, has_saved: bool) -> None:
        """This launcher ends because of a signal.

        Args:
            has_saved: its workers have saved the state of the run before.
        """
        self._say({"say": "leaves", "has_saved": has_saved})

    def _interrupt(self, seconds: float | None) -> Interrupted | None:
        """The signal that has come, or comes before anything else happens or ``seconds`` have passed."""
        signals = self._signals.fileno()
        ready, _, _ = select.select([signals, self._wake_reader], [], [], seconds)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        if signals in ready:
            for number in self._signals.recv(4096):
                if number in (*INTERRUPTS, *FORWARDED):
                    return Interrupted(number)
        return Interrupted(signal.SIGTERM) if self.has_lost_input else None

    def _say(self, message: Message) -> None:
        with self._lock, suppress(OSError):  # the reader notices that the coordinator has gone
            if self._channel.is_sealed:  # else it has not greeted yet, and would not be understood
                self._channel.send(message)

    def _say_alive(self) -> None:
        while not self._closed.wait(self._terms.silence / PULSES):
            self._say({"say": "alive"})

    def _read(self) -> None:
        address, port = self._place
        gone = f"the launcher at {address}, port {port}, which leads the run, "
        advice = "make sure that it has ended, and start the run again: it continues from its last checkpoint"
        try:
            reason: str | None = None
            heard = looked = time.monotonic()
            while reason is None:
                messages: Iterable[Message] | None = None
                with suppress(ConnectionError):  # it has closed the connection, as at the end of the messages
                    try:
                        messages = self._channel.read()
                    except TimeoutError:
                        messages = ()
                    for message in messages or ():
                        heard = time.monotonic()
                        self._obey(message)
                if messages is None:
                    reason = gone + "has gone" if self._is_led else self._reconnect(gone)
                    heard = time.monotonic()
                elif time.monotonic() - looked >= self._terms.silence + STALL_SECONDS:
                    heard = time.monotonic()  # this process did not run meanwhile, and has heard nothing
                elif time.monotonic() - heard >= self._terms.silence:  # parts of a message are no word
                    raise TimeoutError
                looked = time.monotonic()
        except TimeoutError:
            reason = gone + f"has said nothing for {self._terms.silence:g} s"
        except Unproved:
            reason = (
                f"the program that listens at {address}, port {port}, has not shown that it knows the run's secret: "
                f"expected the same {env_table.RUN_SECRET.name} as here, where it is "
                f"{'set' if self._secret else 'not set'}, found another one or none, or another version of this package"
            )
            advice = (
                "set and install the same on all machines, or, if that is a program of others, pass another "
                "--main_process_port on all machines"
            )
        except Exception as error:  # whatever it is, nobody obeys any more
            reason = gone + f"cannot be understood any more: {type(error).__name__}: {error}"
        self._order_end(End(1, f"{reason}; {advice}"))

    def _reconnect(self, gone: str) -> str | None:
        """Connects again to a coordinator that took this launcher for a stranger, as it does in a crowd of them.

        Returns:
            Why that is not possible; ``None`` if it was.
        """
        while not self._closed.wait(RETRY_SECONDS):
            if time.monotonic() > self._deadline:
                return gone + f"has not let this launcher in for {self._terms.join:g} s"
            try:
                connection = socket.create_connection(self._place, timeout=_CONNECT_SECONDS)
            except ConnectionRefusedError:
                break
            except OSError:  # its queue may be full
                continue
            with self._lock:
                self._channel.socket.close()
                self._channel = self._channel_of(connection)
                if not self._closed.is_set():
                    return None
        return gone + "has gone"

    def _greet(self, message: Message) -> None:
        """Answers what a coordinator says first; from here on, both sides have to show that they know the secret."""
        if message.get("do") != "prove":
            raise Misunderstood(f"'do': expected prove, found {message.get('do')!r:.80}")
        challenges = text_in(message, "challenge"), secrets.token_hex(32)
        with self._lock:
            self._channel.send({"say": "challenge", "challenge": challenges[1]})
            self._channel.seal(self._secret, MEMBER, challenges)
            size = {"most": self._terms.most, "num_processes": self._terms.num_processes}
            self._channel.send({"say": "hello", "name": socket.gethostname(), "order": self._order, **size})

    def _obey(self, message: Message) -> None:
        if not self._channel.is_sealed:
            self._greet(message)
            return
        self._is_led = True
        do = message.get("do")
        if do == "offer":
            self._say({"say": "port", "round": number_in(message, "round"), "port": free_port()})
        elif do == "start":
            number, rank, count = (number_in(message, name) for name in ("round", "rank", "count"))
            address, port = text_in(message, "address"), number_in(message, "port", 1, 65535)
            self._pass_on(Start(number, rank, count, address, port))
        elif do == "wait":
            self._pass_on(Wait(text_in(message, "reason")))
        elif do == "stop":
            can_save = message.get("can_save") is True
            self._stop(number_in(message, "round"), text_in(message, "reason"), can_save)
        elif do == "end":
            self._order_end(End(number_in(message, "status", 0, 255), text_in(message, "reason")))
        elif do != "alive":
            raise Misunderstood(f"'do': expected offer, start, wait, stop, end or alive, found {do!r:.80}")

    def _order_end(self, end: End) -> None:
        with self._lock:
            self._is_over, self.stop_reason = True, ""  # the reason is told with the order
            self.can_save = end.status == REQUEUE  # else its workers end by themselves, or those of others are gone
            self._close_stop_writer()
        self._pass_on(end)

    def _pass_on(self, order: Start | Wait | End) -> None:
        """To who waits in :meth:`next_order`."""
        self._orders.put(order)
        os.write(self._wake_writer, b"\0")

    def _stop(self, number: int, reason: str, can_save: bool) -> None:
        with self._lock:
            self._round, self.stop_reason, self.can_save = number, reason, can_save
            self._close_stop_writer()

    def _close_stop_writer(self) -> None:
        if self._stop_writer is not None:
            os.close(self._stop_writer)
            self._stop_writer = None
