"""The first steps of a new worker process, between fork and the training code."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.workers.signals import INTERRUPTS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def tie_to_parent(parent: int, prctl: Callable[..., int] | None = None) -> None:
    """Makes the kernel kill this process when the thread that started it ends; at once if ``parent`` has already ended.

    Raises:
        SystemFailure: the kernel refuses.
    """
    prctl = prctl or ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise SystemFailure(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent:  # it died before prctl, so its death will not be signalled
        os.kill(os.getpid(), signal.SIGKILL)


class ChildSetup:
    """Ties a child to the thread that forks it and gives it its own signal actions; called in the child.

    Built before the fork, because a child of a process with threads must not load anything. The parent forks with
    :data:`INTERRUPTS` blocked (:func:`accelerate_cpp.launch.workers.signals.blocked_signals`); they are unblocked here.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._prctl, self._fflush = libc.prctl, libc.fflush
        self._outputs = [ctypes.c_void_p.in_dll(libc, name) for name in ("stdout", "stderr")]
        self._parent = os.getpid()

    def flush(self) -> None:
        """Writes what the C library holds back of what was printed.

        Of these streams only: another one may be locked by a thread that waits for input.
        """
        for stream in self._outputs:
            self._fflush(stream)

    def __call__(self) -> None:
        """Raises :class:`SystemFailure` where the kernel refuses; ends the process if the parent is already gone."""
        tie_to_parent(self._parent, self._prctl)
        signal.set_wakeup_fd(-1)
        for number in INTERRUPTS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
