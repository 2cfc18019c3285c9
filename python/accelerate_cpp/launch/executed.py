"""Runs a launch plan with workers that are new programs: ``accelerate-cpp launch``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial

from accelerate_cpp.launch import host
from accelerate_cpp.launch.affinity import pinned
from accelerate_cpp.launch.child import ChildSetup
from accelerate_cpp.launch.environment import width_of_terminal, worker_environment
from accelerate_cpp.launch.failure import RunEnd, describe, first_failure, shell_status
from accelerate_cpp.launch.plan import LaunchPlan
from accelerate_cpp.launch.rendezvous import rendezvous_file
from accelerate_cpp.launch.signals import INTERRUPTS, blocked_signals, caught_signals
from accelerate_cpp.launch.supervisor import Supervisor
from accelerate_cpp.launch.worker import Worker
from accelerate_cpp.launch.worker_output import ForwardedBytes, last_error_line, last_traceback

_STDERR = 2
_PEER_LOST = "accelerate_cpp.errors.PeerLost"


def execute(plan: LaunchPlan, *, quiet: bool = False) -> int:
    """Runs ``plan`` to its end and returns the exit status of the launch.

    0 when every worker ended well; else that of the first failing worker; 128 + n for signal n, also for a signal to
    the launcher itself. Nothing of any worker's process group is left on return. ``quiet``: no report of a failure.
    Raises :class:`accelerate_cpp.errors.InvalidArgument` where several workers cannot be started.
    """
    count = plan.group.num_processes
    if count == 1 and not host.can_supervise():
        with pinned(plan.group.cores_of(0)):
            os.execve(plan.command[0], plan.command, worker_environment(plan.group, 0, -1))
    host.require_supervision(count)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # when inherited as ignored, the kernel would discard exit codes
    errors = [ForwardedBytes(_STDERR) for _ in range(count)]
    with caught_signals(INTERRUPTS) as signals, rendezvous_file() as rendezvous, Supervisor(signals) as supervisor:
        setup = ChildSetup()
        for rank in range(count):
            environment = worker_environment(plan.group, rank, rendezvous) | width_of_terminal()
            with pinned(plan.group.cores_of(rank)):
                worker = _start(plan.command, environment, rank, rendezvous, setup, errors[rank])
            supervisor.add(worker)
        end = supervisor.run()
    return _report(end, [forwarded.tail for forwarded in errors], quiet)


def _start(
    command: tuple[str, ...],
    environment: Mapping[str, str],
    rank: int,
    rendezvous: int,
    setup: ChildSetup,
    errors: ForwardedBytes,
) -> Worker:
    read_end, write_end = os.pipe()
    try:
        with blocked_signals():
            process = subprocess.Popen(
                command,
                env=environment,
                stderr=write_end,
                pass_fds=(rendezvous,),
                start_new_session=True,
                preexec_fn=setup,
            )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return Worker(rank, process.pid, {read_end: errors}, process.wait)


def _report(end: RunEnd, tails: list[str], quiet: bool) -> int:
    """Says on standard error how a failed run ended, and returns the exit status."""
    say = partial(print, file=sys.stderr, flush=True)
    if end.interrupted_by is not None:
        return shell_status(-end.interrupted_by)
    failure = first_failure(end.workers, lambda rank: last_error_line(tails[rank]).startswith(_PEER_LOST))
    if failure is None:
        return 0
    several = len(tails) > 1
    if not quiet and several:
        say(f"\nrank {failure.rank} failed first: {describe(failure.exit_code)}")
        say(last_traceback(tails[failure.rank]))
    elif not quiet and failure.exit_code < 0:
        say(f"the worker was {describe(failure.exit_code)}")
    return shell_status(failure.exit_code)
