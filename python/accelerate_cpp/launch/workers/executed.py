"""Runs a launch plan with workers that are new programs: ``accelerate-cpp launch``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from accelerate_cpp.devices.affinity import pinned
from accelerate_cpp.errors import InvalidArgument, SystemFailure
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.environment import width_of_terminal, worker_environment
from accelerate_cpp.launch.plan.launch_plan import LaunchPlan
from accelerate_cpp.launch.view.report import Attempt, place_of
from accelerate_cpp.launch.workers.attendance import attendance
from accelerate_cpp.launch.workers.child import ChildSetup
from accelerate_cpp.launch.workers.failure import describe, failed_status, shell_status
from accelerate_cpp.launch.workers.news import Voice
from accelerate_cpp.launch.workers.notices import Notices
from accelerate_cpp.launch.workers.program import STDIN, start_program
from accelerate_cpp.launch.workers.rendezvous import rendezvous_file
from accelerate_cpp.launch.workers.signals import FORWARDED, INTERRUPTS, caught_signals
from accelerate_cpp.launch.workers.streams import Streams
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker_output import say
from accelerate_cpp.runtime.preemption import REQUEUE


def execute(plan: LaunchPlan, *, quiet: bool = False) -> int:
    """Runs ``plan`` to its end and returns the exit status of the launch.

    0 when every worker ended well; 75 when all saved their state and left, to be started again; else that of the first
    failing worker, after as many attempts as the plan allows; 128 + n for signal n, also for a signal to the launcher
    itself, which ends the attempts; 1 when a worker left while others needed it, or output for a log file was lost, or
    all ended well but the report could not be written.
    Nothing of any worker's process group is left on return.
    ``quiet``: no sentence on standard error about which rank failed first; errors of workers are shown.

    Raises:
        InvalidArgument: several workers cannot be started here, or not be monitored; or the port of rank 0 is taken.
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
    if plan.group.launchers.count > 1 and plan.group.ranks.start == 0:
        host_resources.require_port(plan.group.master_port)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # when inherited as ignored, the kernel would discard exit codes
    attempts: list[Attempt] = []
    has_lost_output, notices = False, Notices()
    with caught_signals((*INTERRUPTS, *FORWARDED)) as signals:
        for number in range(plan.max_restarts + 1):
            with Streams(plan.logs, number, plan.group.ranks, plan.monitor) as streams:
                lifeline = STDIN if plan.ends_with_stdin else None
                attempts.append(attempt(plan, number, streams, signals, lifeline, quiet=quiet, notices=notices))
            has_lost_output |= streams.has_lost_output
            if attempts[-1].failure is None or attempts[-1].end.is_last:
                break
            if number < plan.max_restarts:
                sentence = attempts[-1].sentence()
                again = f"{sentence}; starting all again, restart {number + 1} of {plan.max_restarts}"
                show(attempts[-1], again, quiet)
    status = status_of(attempts[-1]) or int(has_lost_output)
    show(attempts[-1], _closing(attempts[-1], plan.group.world_size), quiet)
    return reported(plan, attempts, status)


def attempt(
    plan: LaunchPlan,
    number: int,
    streams: Streams,
    signals: socket.socket,
    lifeline: int | None,
    *,
    can_save: Callable[[], bool] = lambda: True,
    quiet: bool = False,
    notices: Notices | None = None,
) -> Attempt:
    """Starts all workers, and returns when all have ended.

    Args:
        lifeline: a descriptor whose end ends them as SIGTERM to the launcher does; they get no standard input then.
        can_save: whether workers that are ended can still save their state.
        quiet: tell nothing of workers that fail or are stopped while others run.
        notices: that workers of the attempt before may not have heard.
    """
    began, pids = time.time(), dict[int, int]()
    voice = None
    if plan.group.world_size > 1 and not quiet:
        voice = Voice(
            streams.announce, lambda rank: place_of(rank, pids[rank]), lambda rank: streams.last_output(rank).reported
        )
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
                signals,
                [*streams.consoles, *views],
                lifeline,
                present,
                lambda rank: streams.last_output(rank).blames,
                voice,
                can_save,
                notices,
            )
        )
        inherited = [rendezvous, present.descriptor, *streams.inherited]
        inherited += [] if watched is None else [watched.descriptor]
        setup = ChildSetup()
        for local_rank, rank in enumerate(plan.group.ranks):
            environment = worker_environment(plan.group, local_rank, rendezvous, restarts=(number, plan.max_restarts))
            environment |= width_of_terminal() | streams.environment(local_rank) | present.variables(rank)
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
        standings = {} if watched is None else {standing.rank: standing for standing in watched.look()}
    return Attempt(number, began, pids, end, {rank: streams.last_output(rank) for rank in pids}, standings)


def reported(plan: LaunchPlan, attempts: Sequence[Attempt], status: int) -> int:
    """Writes the report if ``plan`` asks for one, and returns the exit status of the launch.

    A report that cannot be written is told, and changes only a status of 0.
    """
    if plan.report is None:
        return status
    from accelerate_cpp.launch.view.report_file import write_report  # here, as few launches write one

    try:
        write_report(plan.report, plan.command, attempts, status)
    except SystemFailure as error:
        say(f"accelerate-cpp: {error}")
        return status or 1
    return status


def status_of(last: Attempt) -> int:
    """The exit status of a launch whose last attempt this was."""
    if last.is_saved:
        return REQUEUE
    if last.end.interrupted_by is not None:
        return shell_status(-last.end.interrupted_by)
    return 0 if last.failure is None else failed_status(last.failure)


def _closing(last: Attempt, world_size: int) -> str:
    """What the launch says of how a run of so many ranks ended, before the error that ended it."""
    failure = last.failure
    if last.is_saved:
        return last.sentence()
    if failure is None or last.end.interrupted_by is not None:
        return ""
    if world_size > 1:
        return last.sentence()
    return f"the worker was {describe(failure.exit_code)}" if failure.exit_code < 0 else ""


def show(attempt: Attempt, sentence: str, quiet: bool) -> None:
    """Shows on standard error how an attempt failed: ``sentence`` unless ``quiet``, and the errors of its workers."""
    if sentence and not quiet:
        say(f"\n{sentence}" if len(attempt.pids) > 1 else sentence)
    if errors := attempt.errors(again=not quiet):
        say(errors)
