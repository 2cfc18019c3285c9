"""Runs a launch plan with workers that are new programs: ``accelerate-cpp launch``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch import host
from accelerate_cpp.launch.affinity import pinned
from accelerate_cpp.launch.board import board
from accelerate_cpp.launch.child import ChildSetup
from accelerate_cpp.launch.environment import width_of_terminal, worker_environment
from accelerate_cpp.launch.failure import describe, shell_status
from accelerate_cpp.launch.live_view import LiveView
from accelerate_cpp.launch.plan import LaunchPlan
from accelerate_cpp.launch.rendezvous import rendezvous_file
from accelerate_cpp.launch.report import Attempt, write_report
from accelerate_cpp.launch.signals import INTERRUPTS, blocked_signals, caught_signals
from accelerate_cpp.launch.streams import STDERR, STDOUT, Streams
from accelerate_cpp.launch.supervisor import Supervisor
from accelerate_cpp.launch.worker import Sink, Worker
from accelerate_cpp.launch.worker_output import last_traceback

_STDIN = 0


def execute(plan: LaunchPlan, *, quiet: bool = False) -> int:
    """Runs ``plan`` to its end and returns the exit status of the launch.

    0 when every worker ended well; else that of the first failing worker, after as many attempts as the plan allows;
    128 + n for signal n, also for a signal to the launcher itself, which ends the attempts; 1 when output for a log
    file was lost. Nothing of any worker's process group is left on return. ``quiet``: no report of a failure on
    standard error.

    Raises:
        InvalidArgument: several workers cannot be started here, or not be monitored.
        SystemFailure: the report cannot be written.
    """
    count = plan.group.num_processes
    if plan.monitor and not host.can_supervise():
        raise InvalidArgument(
            "--monitor needs Linux 5.4 or newer with memfd_create and pidfd_open, which this system does not offer; "
            "leave it out here"
        )
    if count == 1 and not host.can_supervise():
        with pinned(plan.group.cores_of(0)):
            os.execve(plan.command[0], plan.command, worker_environment(plan.group, 0, -1))
    host.require_supervision(count)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # when inherited as ignored, the kernel would discard exit codes
    attempts: list[Attempt] = []
    has_lost_output = False
    with caught_signals(INTERRUPTS) as signals:
        for number in range(plan.max_restarts + 1):
            with Streams(plan.logs, number, plan.group.ranks, plan.monitor) as streams:
                attempts.append(_attempt(plan, number, streams, signals))
            has_lost_output |= streams.has_lost_output
            if attempts[-1].failure is None or attempts[-1].end.interrupted_by is not None:
                break
            if number < plan.max_restarts and not quiet:
                _say(f"\n{attempts[-1].sentence()}; starting all again, restart {number + 1} of {plan.max_restarts}")
    status = _status(attempts[-1]) or int(has_lost_output)
    if plan.report is not None:
        write_report(plan.report, plan.command, attempts, status)
    if not quiet:
        _tell(attempts[-1])
    return status


def _attempt(plan: LaunchPlan, number: int, streams: Streams, signals: socket.socket) -> Attempt:
    """Starts all workers, and returns when all have ended."""
    began, pids = time.time(), {}
    lifeline = _STDIN if plan.ends_with_stdin else None
    with ExitStack() as stack:
        rendezvous = stack.enter_context(rendezvous_file())
        watched = stack.enter_context(board(plan.group.ranks)) if plan.monitor else None
        views = [] if watched is None else [LiveView(watched, streams.progress())]
        supervisor = stack.enter_context(Supervisor(signals, [*streams.consoles, *views], lifeline))
        inherited = (rendezvous,) if watched is None else (rendezvous, watched.descriptor)
        setup = ChildSetup()
        for local_rank, rank in enumerate(plan.group.ranks):
            environment = worker_environment(plan.group, local_rank, rendezvous, restarts=(number, plan.max_restarts))
            environment |= width_of_terminal() | streams.environment
            if watched is not None:
                environment |= env_table.render({env_table.BOARD: (watched.descriptor, local_rank)})
            with pinned(plan.group.cores_of(local_rank)):
                start = partial(_start, plan.command, environment, rank, inherited, setup)
                worker = start(streams.of(local_rank), None if lifeline is None else subprocess.DEVNULL)
            supervisor.add(worker)
            pids[rank] = worker.pid
        end = supervisor.run()
    return Attempt(number, began, pids, end, streams.tails)


def _start(
    command: tuple[str, ...],
    environment: Mapping[str, str],
    rank: int,
    inherited: tuple[int, ...],
    setup: ChildSetup,
    sinks: Mapping[int, Sink],
    stdin: int | None,
) -> Worker:
    read_ends: dict[int, int] = {}
    with ExitStack() as write_ends, ExitStack() as unless_started:
        passed = {}
        for stream in sinks:
            read_ends[stream], passed[stream] = os.pipe()
            write_ends.callback(os.close, passed[stream])
            unless_started.callback(os.close, read_ends[stream])
        with blocked_signals():
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=passed.get(STDOUT),
                stderr=passed.get(STDERR),
                pass_fds=inherited,
                start_new_session=True,
                preexec_fn=setup,
            )
        unless_started.pop_all()
    return Worker(rank, process.pid, {read_ends[stream]: sink for stream, sink in sinks.items()}, process.wait)


def _status(last: Attempt) -> int:
    if last.end.interrupted_by is not None:
        return shell_status(-last.end.interrupted_by)
    return 0 if last.failure is None else shell_status(last.failure.exit_code)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tell(last: Attempt) -> None:
    """Says on standard error how a failed run ended; what the first failing worker said comes last."""
    failure = last.failure
    if failure is None or last.end.interrupted_by is not None:
        return
    if len(last.pids) > 1:
        _say(f"\n{last.sentence()}")
        _say(last_traceback(last.tails[failure.rank]))
    elif failure.exit_code < 0:
        _say(f"the worker was {describe(failure.exit_code)}")
