"""The life of a forked worker, from the fork to ``os._exit``, and the report of the error that ended it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from accelerate_cpp.comm.joining import announce_error
from accelerate_cpp.launch.fork.kernel_messages import hand_over
from accelerate_cpp.launch.fork.results import send
from accelerate_cpp.launch.plan.environment import become_worker
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.error_report import ErrorReport

_LAUNCHING = "accelerate_cpp.launch"  # the package and the root file launchers
_CHECKPOINTS = "accelerate_cpp.checkpoint.background"


def report_of(error: BaseException) -> ErrorReport:
    """The report of ``error``; its traceback starts at the launched function."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_LAUNCHING):
        frames = frames.tb_next
    return ErrorReport.of(error, frames)


def run_child(
    task: Callable[[], object],
    environment: Mapping[str, str],
    setup: ChildSetup,
    write_ends: tuple[int, int, int, int],
    result: int,
    foreign: Iterable[int],
    shows: bool = False,
) -> NoReturn:
    """Runs ``task()`` as this freshly forked process, then ends it without running what the parent does at its end.

    What is registered with :mod:`threading` for that is run, as executors end their threads by it.

    Args:
        write_ends: descriptors for standard output, standard error, the error report, and what it shows by IPython.
        result: descriptor of the file for the result of ``task()``.
        foreign: descriptors that belong to other workers or to the parent.
        shows: whether the parent shows what it shows by IPython; otherwise that is left out.
    """
    exit_code = 1
    try:
        setup()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the function may clean up on an interrupt
        # A daemon thread has made the fork, and is the main one here: those that it starts are no daemons by default.
        threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
        os.setpgid(0, 0)
        become_worker(environment)
        for descriptor in foreign:
            os.close(descriptor)
        _redirect(*write_ends[:2])
        hand_over(write_ends[3] if shows else None)
        exit_code = _run_task(task, write_ends[2], result)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        setup.flush()
    finally:
        os._exit(exit_code)


def _redirect(stdout: int, stderr: int) -> None:
    """Sends everything that this process prints, also from C, to the pipes; its standard input is empty."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it stays open as long as the process
    sys.stdout = _text_writer(1)
    sys.stderr = _text_writer(2)


def _text_writer(descriptor: int) -> io.TextIOWrapper:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _run_task(task: Callable[[], object], report_to: int, result: int) -> int:
    """Runs ``task()``, sends its result, and waits for the threads that it started; returns the exit code."""
    try:
        request = _request_of(task, result)
        code = 0 if request is None else _code_of(request)
        _await_threads()
        checkpoints = sys.modules.get(_CHECKPOINTS)
        if checkpoints is not None and code == 0:
            checkpoints.raise_at_the_end()
    except BaseException as error:
        _tell(error, report_to)
        announce_error()
        checkpoints = sys.modules.get(_CHECKPOINTS)
        if checkpoints is not None:
            checkpoints.await_writers()
        _part_from_others(error)
        return 1
    _part_from_others(request if code else None)
    return code


def _await_threads() -> None:
    """Waits for the threads that are no daemons, and for those that they start, as the interpreter does at its end."""
    pools = sys.modules.get("concurrent.futures.process")
    if pools is not None:  # those of the parent are not to be woken from here
        for thread in [one for one in pools._threads_wakeups if not one.is_alive()]:
            del pools._threads_wakeups[thread]
    for end in reversed(threading._threading_atexits):  # type: ignore[attr-defined]
        end()  # of executors, whose threads wait for work
    while left := [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]:
        for thread in left:
            thread.join()


def _request_of(task: Callable[[], object], result: int) -> SystemExit | None:
    """Runs ``task()`` and sends its result; returns the ``SystemExit`` that it raised instead."""
    try:
        send(task(), result)
    except SystemExit as request:
        return request
    return None


def _tell(error: BaseException, report_to: int) -> None:
    """Sends the report of ``error``; where none can be made, the parent finds what Python prints."""
    try:
        report = report_of(error).render()
    except Exception:
        sys.__excepthook__(type(error), error, error.__traceback__)
        return
    with open(report_to, "wb", closefd=False) as pipe:
        pipe.write(report)


def _part_from_others(error: BaseException | None) -> None:
    """What the interpreter would do at its end, which this process does not reach."""
    session = sys.modules.get("accelerate_cpp.runtime.session")  # importing it would import torch
    if session is not None:
        session.end_session(error)


def _code_of(request: SystemExit) -> int:
    """The exit code that ``sys.exit`` asks for, as the interpreter reads it."""
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code & 0xFF
    print(request.code, file=sys.stderr)
    return 1
