"""Signals as events: a launch reads them from a socket along with its other events, so none arrives at a bad moment."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
FORWARDED = (signal.SIGUSR1,)
"""What a scheduler may send some time before it ends a run: the workers get it, and decide. One that comes when they
have ended changes nothing, although its default action would end the launcher with another exit status than theirs."""


_come: list[int] = []


def _recorded(number: int, frame: FrameType | None) -> None:
    """Replaces the default action; the number itself travels through the wake-up descriptor."""
    _come.append(number)


def _came_too_late(number: int, frame: FrameType | None) -> None:
    """Replaces the default action of :data:`FORWARDED` once nobody is left whom it concerns."""


def signalled() -> bool:
    """Whether a signal has come since they were caught last, acted on or not."""
    return bool(_come)


@contextmanager
def caught_signals(numbers: tuple[signal.Signals, ...]) -> Iterator[socket.socket]:
    """While entered, each of ``numbers`` arrives as one byte on the yielded socket and has no other effect.

    Signals that the caller ignores (``nohup``, background jobs of a shell) stay ignored. On leaving, the actions of
    before are back, but that :data:`FORWARDED` end the process no more. Main thread only.
    """
    _come.clear()
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        previous = {}
        # The descriptor comes first: between the two calls a signal is delivered twice rather than lost.
        previous_descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            for number in numbers:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    previous[number] = signal.signal(number, _recorded)
            yield reader
        finally:
            for number, action in previous.items():
                is_late = number in FORWARDED and action is signal.SIG_DFL
                signal.signal(number, _came_too_late if is_late else action)
            signal.set_wakeup_fd(previous_descriptor)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Blocks :data:`INTERRUPTS` in this thread, and thereby in a child that it forks, until the child is set up."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
