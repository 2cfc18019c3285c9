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
from dataclasses import dataclass
from functools import partial
from signal import SIGINT

from accelerate_cpp.config import env_table
from accelerate_cpp.launch import host
from accelerate_cpp.launch.affinity import pinned
from accelerate_cpp.launch.board import Board, board
from accelerate_cpp.launch.cells import FunctionFailed
from accelerate_cpp.launch.child import ChildSetup
from accelerate_cpp.launch.environment import WorkerGroup, worker_environment
from accelerate_cpp.launch.failure import RunEnd, describe, first_failure
from accelerate_cpp.launch.forked_child import ErrorReport, run_child
from accelerate_cpp.launch.live_view import CELL_DELAY_SECONDS, LiveView, in_cell
from accelerate_cpp.launch.rendezvous import rendezvous_file
from accelerate_cpp.launch.signals import blocked_signals, caught_signals
from accelerate_cpp.launch.supervisor import Supervisor
from accelerate_cpp.launch.worker import Sink, Worker
from accelerate_cpp.launch.worker_output import ForwardedText


@dataclass(frozen=True)
class _Pipes:
    """The three pipes of one worker: what it prints, what it complains, and the report of the error that ended it."""

    stdout: tuple[int, int]
    stderr: tuple[int, int]
    report: tuple[int, int]

    @property
    def read_ends(self) -> tuple[int, int, int]:
        return self.stdout[0], self.stderr[0], self.report[0]

    @property
    def write_ends(self) -> tuple[int, int, int]:
        return self.stdout[1], self.stderr[1], self.report[1]


def _print_to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


@dataclass(frozen=True)
class Parent:
    """What this process is to workers that it forks. The defaults are for a kernel.

    Attributes:
        environment: of the workers, before the group's; ``None`` is that of this process.
        signals: delivers one byte per interrupt; ``None``: those of this process are caught.
        print_stdout: takes what workers print.
        print_stderr: takes what they complain.
        private: descriptors that workers must not keep.
        display: shows how far the workers are, as text and as HTML; ``None``: that is not shown.
    """

    environment: Mapping[str, str] | None = None
    signals: socket.socket | None = None
    print_stdout: Callable[[str], object] = _print_to_stdout
    print_stderr: Callable[[str], object] = _print_to_stderr
    private: Collection[int] = ()
    display: Callable[[str, str], object] | None = None


def run_forked(
    task: Callable[[], object], group: WorkerGroup, results: Sequence[int], parent: Parent | None = None
) -> None:
    """Runs ``task()`` in each worker of ``group`` and returns when all have ended.

    Args:
        results: for each rank the descriptor of an empty file, into which goes what ``task()`` returns there
            (:func:`accelerate_cpp.launch.results.values_of`).

    Raises :class:`FunctionFailed` for the first worker that failed, KeyboardInterrupt when this process is interrupted,
    and :class:`InvalidArgument` where workers cannot be forked. No worker is left in any case.
    """
    host.require_supervision(group.num_processes)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is buffered is the parent's to print
    parent = parent or Parent()
    reports = [bytearray() for _ in range(group.num_processes)]
    with ExitStack() as stack:
        signals = parent.signals
        if signals is None and threading.current_thread() is threading.main_thread():
            signals = stack.enter_context(caught_signals((SIGINT,)))
        rendezvous = stack.enter_context(rendezvous_file())
        watched, views = None, []
        if parent.display is not None:
            watched = stack.enter_context(board(group.ranks))
            views.append(LiveView(watched, in_cell(parent.display), CELL_DELAY_SECONDS))
        forks = stack.enter_context(_Forks(task, group, (rendezvous, watched), results, parent))
        supervisor = stack.enter_context(Supervisor(signals, views))
        forks.start(supervisor, reports)
        end = supervisor.run()
    _raise_failure(end, [ErrorReport.parse(bytes(report)) for report in reports])


class _Forks:
    """The thread that forks the workers. It lives until they have ended: the kernel kills them when it ends."""

    def __init__(
        self,
        task: Callable[[], object],
        group: WorkerGroup,
        files: tuple[int, Board | None],
        results: Sequence[int],
        parent: Parent,
    ) -> None:
        rendezvous, watched = files
        self._task = task
        self._group = group
        self._results = results
        self._parent = parent
        self._environments = [
            worker_environment(group, rank, rendezvous, parent.environment)
            | ({} if watched is None else env_table.render({env_table.BOARD: (watched.descriptor, rank)}))
            for rank in range(group.num_processes)
        ]
        self._setup = ChildSetup()
        self._finished = threading.Event()
        self._forked: Future[None] = Future()
        self._pids: list[int] = []
        self._pipes: list[_Pipes] = []
        self._thread = threading.Thread(target=self._run, name="accelerate-cpp-forks", daemon=True)

    def __enter__(self) -> _Forks:
        return self

    def __exit__(self, *error: object) -> None:
        self._finished.set()

    def start(self, supervisor: Supervisor, reports: list[bytearray]) -> None:
        """Forks every worker and hands it to ``supervisor``; its error report will be in ``reports[rank]``."""
        for _ in self._environments:
            self._pipes.append(_Pipes(os.pipe(), os.pipe(), os.pipe()))
        self._thread.start()
        try:
            self._forked.exception()  # waits
            for rank, pid in enumerate(self._pids):
                supervisor.add(self._worker(rank, pid, reports[rank]))
        finally:
            for rank, pipes in enumerate(self._pipes):
                in_use = pipes.read_ends if rank < len(self._pids) else ()
                for descriptor in {*pipes.read_ends, *pipes.write_ends}.difference(in_use):
                    os.close(descriptor)
        self._forked.result()

    def _worker(self, rank: int, pid: int, report: bytearray) -> Worker:
        pipes = self._pipes[rank]
        outputs: dict[int, Sink] = {
            pipes.stdout[0]: ForwardedText(self._parent.print_stdout),
            pipes.stderr[0]: ForwardedText(self._parent.print_stderr),
            pipes.report[0]: report.extend,
        }
        return Worker(rank, pid, outputs, partial(os.waitpid, pid, 0))

    def _run(self) -> None:
        try:
            with blocked_signals():
                for rank in range(len(self._environments)):
                    with pinned(self._group.cores_of(rank)):
                        self._fork(rank)
        except BaseException as error:
            self._forked.set_exception(error)
        else:
            self._forked.set_result(None)
        self._finished.wait()

    def _fork(self, rank: int) -> None:
        pid = os.fork()
        if pid == 0:
            own = self._pipes[rank].write_ends
            pipes = {end for pipes in self._pipes for end in (*pipes.read_ends, *pipes.write_ends)}
            foreign = {*pipes, *self._results, *self._parent.private}.difference(own, (self._results[rank],))
            run_child(self._task, self._environments[rank], self._setup, own, self._results[rank], foreign)
        self._pids.append(pid)
        os.setpgid(pid, pid)  # the child does the same; whoever is first, the group exists before it is signalled


def _raise_failure(end: RunEnd, reports: list[ErrorReport | None]) -> None:
    if end.interrupted_by is not None:
        raise KeyboardInterrupt

    def lost_a_peer(rank: int) -> bool:
        report = reports[rank]
        return report is not None and report.lost_a_peer

    failure = first_failure(end.workers, lost_a_peer)
    if failure is None:
        return
    report = reports[failure.rank]
    if report is None:
        message = f"rank {failure.rank} failed: {describe(failure.exit_code)}"
    else:
        message = f"rank {failure.rank} failed: {report.summary}\n\n{report.traceback}"
    raise FunctionFailed(message, failure.rank, failure.exit_code)
