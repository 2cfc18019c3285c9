"""Runs a function in workers that are forks of this process: of the notebook's kernel, or of its fork server.

The forks are made by a thread of their own, which then is the main thread of each child. It has never entered an
OpenMP region, so the child does not wait for the parent's OpenMP threads, which a fork does not copy; and as the main
thread it may install signal handlers, as training code does.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from signal import SIGINT, SIGKILL
from string import Template
from typing import TextIO

from accelerate_cpp.devices.affinity import pinned
from accelerate_cpp.launch.fork.forked_child import run_child
from accelerate_cpp.launch.fork.kernel_messages import Message, Messages
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.environment import WorkerGroup, worker_environment
from accelerate_cpp.launch.view.live_view import CELL_DELAY_SECONDS, LiveView, in_cell
from accelerate_cpp.launch.view.notebook_cells import FunctionFailed
from accelerate_cpp.launch.workers.attendance import Attendance, attendance
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.error_report import ErrorReport, load_modules_of_reports
from accelerate_cpp.launch.workers.failure import Blames, RunEnd, account, describe, first_failure
from accelerate_cpp.launch.workers.news import Voice
from accelerate_cpp.launch.workers.rendezvous import rendezvous_file
from accelerate_cpp.launch.workers.signals import blocked_signals, caught_signals
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker import Sink, Worker
from accelerate_cpp.launch.workers.worker_output import ForwardedText, PrefixedText
from accelerate_cpp.runtime.progress_board import Board, board

_ROLE = "default"  # torch's name of workers that have none


@dataclass(frozen=True)
class _Pipes:
    """The pipes of one worker: standard output and error, the report of its error, and what it shows in a notebook."""

    stdout: tuple[int, int]
    stderr: tuple[int, int]
    report: tuple[int, int]
    shown: tuple[int, int]

    @classmethod
    def made(cls) -> _Pipes:
        """New ones; none is left open if the system refuses one."""
        pipes: list[tuple[int, int]] = []
        try:
            for _ in fields(cls):
                pipes.append(os.pipe())
        except OSError:
            for descriptor in chain(*pipes):
                os.close(descriptor)
            raise
        return cls(*pipes)

    @property
    def read_ends(self) -> tuple[int, int, int, int]:
        return self.stdout[0], self.stderr[0], self.report[0], self.shown[0]

    @property
    def write_ends(self) -> tuple[int, int, int, int]:
        return self.stdout[1], self.stderr[1], self.report[1], self.shown[1]


def _print_to_stdout(text: str) -> None:
    _print(text, sys.stdout)


def _print_to_stderr(text: str) -> None:
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO | None) -> None:
    if stream is not None:  # as in a program that was started without it
        stream.write(text)
        stream.flush()


@dataclass(frozen=True)
class Parent:
    """How this process serves the workers that it forks. The defaults are for a kernel.

    Attributes:
        environment: of the workers, before the group's; ``None`` is that of this process.
        signals: delivers one byte per interrupt; ``None``: those of this process are caught.
        print_stdout: receives the standard output of workers.
        print_stderr: receives their standard error.
        private: descriptors that workers must not keep.
        display: shows how far the workers are, as text and as HTML; ``None``: that is not shown.
        show: sends what rank 0 shows by IPython to the notebook; ``None``: there is none.
    """

    environment: Mapping[str, str] | None = None
    signals: socket.socket | None = None
    print_stdout: Callable[[str], object] = _print_to_stdout
    print_stderr: Callable[[str], object] = _print_to_stderr
    private: Collection[int] = ()
    display: Callable[[str, str], object] | None = None
    show: Callable[[Message], object] | None = None


@dataclass(frozen=True)
class Supervision:
    """How launched functions are watched.

    Attributes:
        max_restarts: how often all workers are started again after one has failed.
        line_prefix: printed before each line of their output, with ``${role_name}``, ``${rank}`` and ``${local_rank}``
            in it; ``None``: output is not changed.
    """

    max_restarts: int = 0
    line_prefix: str | None = None


def run_forked(
    task: Callable[[], object],
    group: WorkerGroup,
    results: Sequence[int],
    parent: Parent | None = None,
    supervision: Supervision | None = None,
) -> None:
    """Runs ``task()`` in each worker of ``group`` and returns when all have ended.

    Args:
        results: for each worker the descriptor of an empty file, for the result of ``task()`` there
            (:func:`accelerate_cpp.launch.fork.results.values_of`).

    Raises :class:`FunctionFailed` for the first worker that failed in the last attempt, KeyboardInterrupt when this
    process is interrupted, :class:`InvalidArgument` if workers cannot be forked, and OSError if the system refuses
    processes or descriptors. In all cases, no worker is left running.
    """
    host_resources.require_supervision(group.num_processes)
    load_modules_of_reports()
    parent, supervision = parent or Parent(), supervision or Supervision()
    with ExitStack() as stack:
        signals = parent.signals
        if signals is None and threading.current_thread() is threading.main_thread():
            signals = stack.enter_context(caught_signals((SIGINT,)))
        run = _Run(task, group, results, replace(parent, signals=signals), supervision)
        while True:
            failure, is_last = _attempt(run)
            if failure is None:
                return
            if is_last or run.number == supervision.max_restarts:
                raise failure
            run = replace(run, number=run.number + 1)
            restart = f"restart {run.number} of {supervision.max_restarts}"
            parent.print_stderr(f"{failure}\n\nstarting all again, {restart}\n")
            for file in results:
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)


@dataclass(frozen=True)
class _Run:
    """One attempt at a call of :func:`run_forked`; ``number`` counts the attempts before it."""

    task: Callable[[], object]
    group: WorkerGroup
    results: Sequence[int]
    parent: Parent
    supervision: Supervision
    number: int = 0

    def environment(self, worker: int, rendezvous: int, watched: Board | None) -> dict[str, str]:
        """The environment of the worker with this number."""
        restarts = (self.number, self.supervision.max_restarts)
        told = worker_environment(self.group, worker, rendezvous, self.parent.environment, restarts)
        return told if watched is None else told | watched.variables(worker)

    def output(self, worker: int, write: Callable[[str], object]) -> Sink:
        """The receiver of the bytes of one of the worker's streams."""
        if self.supervision.line_prefix is None:
            return ForwardedText(write)
        names = {"role_name": _ROLE, "rank": self.group.ranks[worker], "local_rank": worker}
        return PrefixedText(Template(self.supervision.line_prefix).safe_substitute(names), write)


def _attempt(run: _Run) -> tuple[FunctionFailed | None, bool]:
    """Forks all workers, and returns when all have ended: the first failure, and whether no other attempt follows."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()  # buffered output is printed by the parent
    reports = [bytearray() for _ in run.group.ranks]

    def blames(worker: int) -> Collection[int] | None:
        report = ErrorReport.parse(bytes(reports[worker]))
        if report is None or report.blames is None:
            return None
        return [rank - run.group.ranks.start for rank in report.blames]

    def error_of(worker: int) -> str:
        report = ErrorReport.parse(bytes(reports[worker]))
        return "" if report is None else report.headline

    voice = Voice(
        lambda text: run.parent.print_stderr(f"{text}\n"),
        lambda one: f"rank {run.group.ranks[one]}",
        error_of,
        run.group.ranks.start,
    )
    with ExitStack() as stack:
        rendezvous = stack.enter_context(rendezvous_file())
        watched, views = None, []
        if run.parent.display is not None:
            watched = stack.enter_context(board(run.group.ranks))
            views.append(LiveView(watched, in_cell(run.parent.display), CELL_DELAY_SECONDS))
        present = stack.enter_context(attendance())
        forks = stack.enter_context(_Forks(run, rendezvous, watched, present))
        supervisor = stack.enter_context(Supervisor(run.parent.signals, views, None, present, blames, voice))
        forks.start(supervisor, reports)
        end = supervisor.run()
    return _failure(run.group, end, blames, [bytes(report) for report in reports]), end.is_last


class _Forks:
    """The thread that forks the workers. It runs until they have ended: the kernel kills them when it ends."""

    def __init__(self, run: _Run, rendezvous: int, watched: Board | None, present: Attendance) -> None:
        self._asked = run
        workers = range(run.group.num_processes)
        self._environments = [
            run.environment(worker, rendezvous, watched) | present.variables(worker) for worker in workers
        ]
        self._setup = ChildSetup()
        self._finished = threading.Event()
        self._forked: Future[None] = Future()
        self._pids: list[int] = []
        self._num_watched = 0  # by a supervisor, which ends and reaps them
        self._num_offered = 0
        self._pipes: list[_Pipes] = []
        self._thread = threading.Thread(target=self._run, name="accelerate-cpp-forks", daemon=True)

    def __enter__(self) -> _Forks:
        return self

    def __exit__(self, *error: object) -> None:
        self._finished.set()
        if self._thread.ident is not None:
            self._thread.join()  # a thread that the end of the interpreter finds at work can abort the process
        for pid in self._pids[self._num_offered :]:
            os.kill(pid, SIGKILL)
            os.waitpid(pid, 0)

    def start(self, supervisor: Supervisor, reports: list[bytearray]) -> None:
        """Forks every worker and hands it to ``supervisor``; its error report will be in ``reports``."""
        try:
            for _ in self._environments:
                self._pipes.append(_Pipes.made())
            self._setup.flush()  # what C code holds back here must not come from the children, too
            self._thread.start()
            self._forked.exception()  # waits
            for number, pid in enumerate(self._pids):
                self._num_offered += 1  # one that it cannot watch it reaps as well
                supervisor.add(self._worker(number, pid, reports[number]))
                self._num_watched += 1
        finally:
            for number, pipes in enumerate(self._pipes):
                in_use = pipes.read_ends if number < self._num_watched else ()
                for descriptor in {*pipes.read_ends, *pipes.write_ends}.difference(in_use):
                    os.close(descriptor)
        self._forked.result()

    def _worker(self, number: int, pid: int, report: bytearray) -> Worker:
        pipes, run = self._pipes[number], self._asked
        outputs: dict[int, Sink] = {
            pipes.stdout[0]: run.output(number, run.parent.print_stdout),
            pipes.stderr[0]: run.output(number, run.parent.print_stderr),
            pipes.report[0]: report.extend,
            pipes.shown[0]: Messages(run.parent.show or (lambda message: None)),
        }
        return Worker(number, pid, outputs, partial(os.waitpid, pid, 0))

    def _run(self) -> None:
        try:
            with blocked_signals():
                for number in range(len(self._environments)):
                    with pinned(self._asked.group.cores_of(number)):
                        self._fork(number)
        except BaseException as error:
            self._forked.set_exception(error)
        else:
            self._forked.set_result(None)
        self._finished.wait()

    def _fork(self, number: int) -> None:
        pid = os.fork()
        if pid == 0:
            run, own = self._asked, self._pipes[number].write_ends
            pipes = {end for pipes in self._pipes for end in (*pipes.read_ends, *pipes.write_ends)}
            result = run.results[number]
            foreign = {*pipes, *run.results, *run.parent.private}.difference(own, (result,))
            shows = run.parent.show is not None and run.group.ranks[number] == 0
            run_child(run.task, self._environments[number], self._setup, own, result, foreign, shows)
        self._pids.append(pid)
        os.setpgid(pid, pid)  # the child does the same; whichever is first, the group exists before it is signalled


def _failure(group: WorkerGroup, end: RunEnd, blames: Blames, reports: Sequence[bytes]) -> FunctionFailed | None:
    """The error of the worker that failed or left first. KeyboardInterrupt is raised: it ends the attempts."""
    if end.interrupted_by is not None:
        raise KeyboardInterrupt
    failure = first_failure(end, blames)
    if failure is None:
        return None
    report, rank = ErrorReport.parse(reports[failure.rank]), group.ranks[failure.rank]
    if failure.exit_code == 0 or failure.while_ending:
        message = f"rank {rank} {account(failure, end, group.ranks.start)}{_waiting(group, reports)}"
    elif report is None:
        message = f"rank {rank} failed: {describe(failure.exit_code)}{_waiting(group, reports)}"
    else:
        message = f"rank {rank} failed: {report.summary}\n\n{report.traceback}"
    return FunctionFailed(message, rank, failure.exit_code)


def _waiting(group: WorkerGroup, reports: Sequence[bytes]) -> str:
    """Where a worker was that waited for one that left, died or did not answer; empty if none has said so."""
    for rank, report in zip(group.ranks, map(ErrorReport.parse, reports), strict=False):
        if report is not None and report.blames is not None:
            return f"\n\nrank {rank} waited for it:\n\n{report.traceback}"
    return ""
