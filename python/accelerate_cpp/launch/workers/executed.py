"""Runs a launch plan with workers that are new programs: ``accelerate-cpp launch``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

from accelerate_cpp.devices.affinity import pinned
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.environment import width_of_terminal, worker_environment
from accelerate_cpp.launch.plan.launch_plan import LaunchPlan
from accelerate_cpp.launch.view.report import Attempt, write_report
from accelerate_cpp.launch.workers.attendance import attendance
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.failure import describe, failed_status, shell_status
from accelerate_cpp.launch.workers.program import STDIN, start_program
from accelerate_cpp.launch.workers.rendezvous import rendezvous_file
from accelerate_cpp.launch.workers.signals import INTERRUPTS, caught_signals
from accelerate_cpp.launch.workers.streams import Streams
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker_output import blamed_ranks, last_traceback


def execute(plan: LaunchPlan, *, quiet: bool = False) -> int:
    """Runs ``plan`` to its end and returns the exit status of the launch.

    0 when every worker ended well; else that of the first failing worker, after as many attempts as the plan allows;
    128 + n for signal n, also for a signal to the launcher itself, which ends the attempts; 1 when a worker left while
    others needed it, or output for a log file was lost. Nothing of any worker's process group is left on return.
    ``quiet``: no report of a failure on standard error.

    Raises:
        InvalidArgument: several workers cannot be started here, or not be monitored.
        SystemFailure: the report cannot be written.
    """
    count = plan.group.num_processes
    if plan.monitor and not host_resources.can_supervise():
        raise InvalidArgument(
            "--monitor needs Linux 5.4 or newer with memfd_create and pidfd_open, which this system does not offer; "
            "leave it out here"
        )
    if count == 1 and not host_resources.can_supervise():
        with pinned(plan.group.cores_of(0)):
            os.execve(plan.command[0], plan.command, worker_environment(plan.group, 0, -1))
    host_resources.require_supervision(count)
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
    lifeline = STDIN if plan.ends_with_stdin else None
    with ExitStack() as stack:
        rendezvous = stack.enter_context(rendezvous_file())
        watched, views = None, []
        if plan.monitor:
            from accelerate_cpp.launch.view.live_view import LiveView
            from accelerate_cpp.runtime.progress_board import board  # here, as few launches show anything

            watched = stack.enter_context(board(plan.group.ranks))
            views.append(LiveView(watched, streams.progress()))
        present = stack.enter_context(attendance())
        supervisor = stack.enter_context(
            Supervisor(
                signals, [*streams.consoles, *views], lifeline, present, lambda rank: blamed_ranks(streams.tails[rank])
            )
        )
        inherited = [rendezvous, present.descriptor] + ([] if watched is None else [watched.descriptor])
        setup = ChildSetup()
        for local_rank, rank in enumerate(plan.group.ranks):
            environment = worker_environment(plan.group, local_rank, rendezvous, restarts=(number, plan.max_restarts))
            environment |= width_of_terminal() | streams.environment | present.variables(rank)
            if watched is not None:
                environment |= watched.variables(local_rank)
            with pinned(plan.group.cores_of(local_rank)):
                worker = start_program(
                    plan.command,
                    rank,
                    setup,
                    streams.of(local_rank),
                    environment=environment,
                    stdin=None if lifeline is None else subprocess.DEVNULL,
                    inherited=inherited,
                )
            supervisor.add(worker)
            pids[rank] = worker.pid
        end = supervisor.run()
    return Attempt(number, began, pids, end, streams.tails)


def _status(last: Attempt) -> int:
    if last.end.interrupted_by is not None:
        return shell_status(-last.end.interrupted_by)
    return 0 if last.failure is None else failed_status(last.failure)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tell(last: Attempt) -> None:
    """Reports on standard error how a failed run ended, with the error of the first failing worker last."""
    failure = last.failure
    if failure is None or last.end.interrupted_by is not None:
        return
    if len(last.pids) > 1:
        _say(f"\n{last.sentence()}")
        _say(last_traceback(last.tails[failure.rank]))
    elif failure.exit_code < 0:
        _say(f"the worker was {describe(failure.exit_code)}")
