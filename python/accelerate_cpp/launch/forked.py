"""Runs a function in workers that are forks of this process: ``notebook_launcher``.

The forks are made by a thread of their own, which then is the main thread of each child. It has never entered an
OpenMP region, so the child does not wait for the parent's OpenMP threads, which a fork does not copy; and as the main
thread it may install signal handlers, as training code does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from signal import SIGINT

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch import host
from accelerate_cpp.launch.affinity import pinned, shares_of_launch
from accelerate_cpp.launch.child import ChildSetup
from accelerate_cpp.launch.environment import WorkerGroup, threads_per_worker, worker_environment
from accelerate_cpp.launch.failure import RunEnd, WorkerFailed, describe, first_failure
from accelerate_cpp.launch.forked_child import ErrorReport, run_child
from accelerate_cpp.launch.rendezvous import rendezvous_file
from accelerate_cpp.launch.signals import blocked_signals, caught_signals
from accelerate_cpp.launch.supervisor import Supervisor
from accelerate_cpp.launch.worker import Sink, Worker
from accelerate_cpp.launch.worker_output import ForwardedText


def function_group(
    num_processes: int | None,
    *,
    cpu: bool = False,
    mixed_precision: str | None = None,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
) -> WorkerGroup:
    """The settings of a launched function.

    Args:
        num_processes: ``None`` is one per visible GPU, or 1 without GPUs.
        mixed_precision: ``None`` leaves it to the environment.
    """
    cpu = cpu or env_table.USE_CPU.get()
    if num_processes is None:
        num_processes = 1 if cpu else max(1, host.gpu_count(os.environ))
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise InvalidArgument(f"num_processes={num_processes!r}: expected an integer of at least 1")
    shares = shares_of_launch(num_processes, os.environ, on_gpus=not cpu) if env_table.CPU_AFFINITY.get() else ()
    return WorkerGroup(
        num_processes=num_processes,
        cpu=cpu,
        mixed_precision=mixed_precision or env_table.MIXED_PRECISION.get() or "no",
        num_threads=threads_per_worker(num_processes, None, os.environ, shares),
        master_addr=master_addr,
        master_port=master_port or host.free_port(),
        debug=env_table.DEBUG_MODE.get(),
        fork_launched=True,
        shares=shares,
    )


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


def run_forked(task: Callable[[], object], group: WorkerGroup) -> None:
    """Runs ``task()`` in each worker of ``group`` and returns when all have ended.

    Raises :class:`WorkerFailed` for the first worker that failed, KeyboardInterrupt when this process is interrupted,
    and :class:`InvalidArgument` where workers cannot be forked. No worker is left in any case.
    """
    host.require_supervision(group.num_processes)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # what is buffered is the parent's to print
    reports = [bytearray() for _ in range(group.num_processes)]
    with ExitStack() as stack:
        in_main_thread = threading.current_thread() is threading.main_thread()
        signals = stack.enter_context(caught_signals((SIGINT,)) if in_main_thread else nullcontext())
        forks = stack.enter_context(_Forks(task, group, stack.enter_context(rendezvous_file())))
        supervisor = stack.enter_context(Supervisor(signals))
        forks.start(supervisor, reports)
        end = supervisor.run()
    _raise_failure(end, [ErrorReport.parse(bytes(report)) for report in reports])


class _Forks:
    """The thread that forks the workers. It lives until they have ended: the kernel kills them when it ends."""

    def __init__(self, task: Callable[[], object], group: WorkerGroup, rendezvous: int) -> None:
        self._task = task
        self._group = group
        self._environments = [worker_environment(group, rank, rendezvous) for rank in range(group.num_processes)]
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
            pipes.stdout[0]: ForwardedText(_print_to_stdout),
            pipes.stderr[0]: ForwardedText(_print_to_stderr),
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
            others = {end for pipes in self._pipes for end in (*pipes.read_ends, *pipes.write_ends)}
            run_child(self._task, self._environments[rank], self._setup, own, others - set(own))
        self._pids.append(pid)
        os.setpgid(pid, pid)  # the child does the same; whoever is first, the group exists before it is signalled


def _print_to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_to_stderr(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


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
    raise WorkerFailed(message, failure.rank, failure.exit_code)
