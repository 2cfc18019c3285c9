"""The life of a forked worker, from the fork to ``os._exit``, and the report of the error that ended it."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NoReturn

from accelerate_cpp.launch.fork.results import send
from accelerate_cpp.launch.plan.environment import become_worker
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.worker_output import blamed_by

_LAUNCHING = "accelerate_cpp.launch"  # the package and the root file launchers


@dataclass(frozen=True)
class ErrorReport:
    """The exception that ended a worker, as text: it crosses to the parent without pickling.

    ``blames`` are the ranks that it names as its cause; ``None`` if it is the worker's own.
    """

    summary: str
    traceback: str
    blames: tuple[int, ...] | None

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """The report of ``error``; its traceback starts at the launched function."""
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_LAUNCHING):
            frames = frames.tb_next
        summary = "".join(traceback.format_exception_only(error)).strip()
        return cls(
            summary,
            "".join(traceback.format_exception(type(error), error, frames)).rstrip(),
            blamed_by(summary.partition("\n")[0]),
        )

    def render(self) -> bytes:
        """The report as bytes for the pipe."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, data: bytes) -> ErrorReport | None:
        """The report in ``data``; ``None`` when the worker sent none, or died before it had sent all of it."""
        try:
            known = json.loads(data)
            blames = known.pop("blames")
            return cls(**known, blames=None if blames is None else tuple(blames))
        except ValueError:
            return None


def run_child(
    task: Callable[[], object],
    environment: Mapping[str, str],
    setup: ChildSetup,
    write_ends: tuple[int, int, int],
    result: int,
    foreign: Iterable[int],
) -> NoReturn:
    """Runs ``task()`` as this freshly forked process, then ends it without running any of the parent's code.

    Args:
        write_ends: descriptors for standard output, standard error and the error report.
        result: descriptor of the file for the result of ``task()``.
        foreign: descriptors that belong to other workers or to the parent.
    """
    exit_code = 1
    try:
        setup()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the function may clean up on an interrupt
        os.setpgid(0, 0)
        become_worker(environment)
        for descriptor in foreign:
            os.close(descriptor)
        _redirect(*write_ends[:2])
        exit_code = _run_task(task, write_ends[2], result)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
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
        send(task(), result)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    except SystemExit as request:
        code = _code_of(request)
        _part_from_others(request if code else None)
        return code
    except BaseException as error:
        with open(report_to, "wb", closefd=False) as pipe:
            pipe.write(ErrorReport.of(error).render())
        _part_from_others(error)
        return 1
    _part_from_others(None)
    return 0


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
