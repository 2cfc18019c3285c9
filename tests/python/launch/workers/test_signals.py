from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from accelerate_cpp.launch.workers.signals import blocked_signals, caught_signals, signalled


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_caught_signal_arrives_as_a_byte_and_interrupts_nothing() -> None:
    with caught_signals((signal.SIGINT,)) as arrived:
        os.kill(os.getpid(), signal.SIGINT)
        select.select([arrived], [], [])
        assert arrived.recv(8) == bytes([signal.SIGINT])
    assert signalled()  # what is told at the end waits for no reader either
    with caught_signals((signal.SIGINT,)):
        assert not signalled()


def test_previous_action_is_back_on_leaving() -> None:
    with caught_signals((signal.SIGINT,)):
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_notice_that_comes_after_the_run_does_not_end_the_launcher() -> None:
    former = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with caught_signals((signal.SIGUSR1,)):
            pass
        os.kill(os.getpid(), signal.SIGUSR1)
        with caught_signals((signal.SIGUSR1,)) as arrived:  # of the next launch in this process
            os.kill(os.getpid(), signal.SIGUSR1)
            select.select([arrived], [], [])
            assert arrived.recv(8) == bytes([signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, former)


def test_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with caught_signals((signal.SIGINT,)):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_blocked_signal_arrives_after_the_block() -> None:
    with pytest.raises(KeyboardInterrupt), blocked_signals():
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        assert signal.SIGINT in signal.sigpending()
