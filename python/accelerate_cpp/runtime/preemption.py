"""Notices that a scheduler wants the machine back, and what processes agree to do about them.

Kubernetes sends SIGTERM some time before it ends a pod, Slurm SIGTERM when it preempts a job and any signal that was
asked for (``sbatch --signal=USR1@120``). torch is imported when processes agree, as launchers use this module, too.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from accelerate_cpp.comm.joining import announce_saving
from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

REQUEUE = 75
"""The exit status of a program that has saved its state and wants to be started again (``EX_TEMPFAIL``)."""
NOTICES = (signal.SIGTERM, signal.SIGUSR1)

_logger = logging.getLogger(__name__)
_noticed: int | None = None
_is_listening = False
_watches_forks = False
_forking = threading.local()


def is_listening() -> bool:
    """Whether this process remembers notices already."""
    return _is_listening


def listen() -> None:
    """From now on :data:`NOTICES` to this process are remembered, and end nothing.

    A launcher is told, and then waits longer for this process when it is ended itself.

    Raises:
        InvalidArgument: called for the first time in another thread than the main one, which alone receives signals.
    """
    global _is_listening, _watches_forks
    if _is_listening:
        return
    if threading.current_thread() is not threading.main_thread():
        raise InvalidArgument(
            "leave_if_preempted was called in a thread, but Python handles signals in the main thread: call it there "
            "once before"
        )
    for number in NOTICES:
        signal.signal(number, _remember)
    if not _watches_forks:
        os.register_at_fork(before=_hold_back, after_in_parent=_let_come, after_in_child=_forget)
        atexit.register(_ignore_at_exit)
        _watches_forks = True
    _is_listening = True
    announce_saving()


def any_process_has_notice(world_size: int, device: torch.device) -> bool:
    """Whether a notice has come to any of the processes. Collective.

    Args:
        device: for a tensor that they all have, unless their group takes one on the host, for which no device waits.
    """
    if world_size == 1:
        return _noticed is not None
    import torch
    import torch.distributed as dist

    takes_host = "cpu:" in str(dist.get_backend_config())
    flag = torch.tensor([_noticed is not None], dtype=torch.int32, device="cpu" if takes_host else device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def ignore() -> None:
    """Further notices change nothing, also while the interpreter ends, which otherwise takes back all handlers."""
    for number in NOTICES:
        signal.signal(number, signal.SIG_IGN)


def say_where(folder: Path) -> None:
    """Logs that the state of the run is saved in ``folder``, and why."""
    why = "another process was told to end" if _noticed is None else f"{signal.Signals(_noticed).name} has come"
    _logger.warning("%s: the state of the run is in %s, and its processes leave to be started again", why, folder)


def _ignore_at_exit() -> None:
    """A program that has come to its end has done its work: a notice must not make it look as if it had not."""
    if _is_listening:
        ignore()


def _hold_back() -> None:
    """Lets notices wait while this thread forks, so that none comes to the new process before it is ready for them."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())  # first: an interrupt may be raised in the next line
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)


def _let_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _forget() -> None:
    """Lets notices end a process that a fork has started, as they do by default, until it listens itself."""
    global _is_listening, _noticed
    _is_listening, _noticed = False, None
    for number in NOTICES:
        if signal.getsignal(number) is _remember:
            signal.signal(number, signal.SIG_DFL)
    _let_come()


def _remember(number: int, frame: FrameType | None) -> None:
    global _noticed
    _noticed = number
