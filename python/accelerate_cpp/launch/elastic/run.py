"""A launcher of an elastic run: one round of its workers after the other, as the coordinator says."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.elastic.coordinator import Coordinator
from accelerate_cpp.launch.elastic.member import RETRY_SECONDS, End, Interrupted, Member, Start, Wait
from accelerate_cpp.launch.elastic.messages import key_of
from accelerate_cpp.launch.elastic.rounds import Terms
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.launch_plan import ElasticRun, LaunchPlan
from accelerate_cpp.launch.plan.machines import Launchers
from accelerate_cpp.launch.view.report import Attempt
from accelerate_cpp.launch.workers.end_of_input import watched_stdin
from accelerate_cpp.launch.workers.executed import attempt, reported, show, status_of
from accelerate_cpp.launch.workers.failure import failed_status, shell_status
from accelerate_cpp.launch.workers.notices import Notices
from accelerate_cpp.launch.workers.signals import FORWARDED, INTERRUPTS, caught_signals
from accelerate_cpp.launch.workers.streams import Streams
from accelerate_cpp.launch.workers.worker_output import say
from accelerate_cpp.runtime.preemption import REQUEUE

_BACKLOG = 128


def execute_elastic(plan: LaunchPlan, elastic: ElasticRun, *, quiet: bool = False) -> int:
    """Runs ``plan`` with the launchers of other machines that are there, to its end, and returns the exit status.

    0 when all workers ended well; that of the first failure, when there were more of them than restarts; 75 when all
    workers saved their state and left; 128 + n for signal n; 1 when the launcher that leads the run has gone, or too
    few came, all ended well but the report could not be written, or output for a log file was lost.

    Raises:
        InvalidArgument: workers cannot be started here, or nobody leads the run.
    """
    group = plan.group
    host_resources.require_supervision(group.num_processes)
    terms = _terms(plan, elastic)
    secret = env_table.RUN_SECRET.get()
    key_of(secret)  # refused before anyone waits for this launcher
    attempts: list[Attempt] = []
    with ExitStack() as stack:
        signals = stack.enter_context(caught_signals((*INTERRUPTS, *FORWARDED)))
        listener = None
        if _is_known(group.master_addr, terms.join, signals):
            listener = _listener(group.launchers, group.master_addr, group.master_port, elastic.is_numbered)
        if listener is not None:
            stack.enter_context(Coordinator(listener, group.master_addr, terms, secret))
        order = group.launchers.rank if elastic.is_numbered else 0 if listener is not None else 1
        member = stack.enter_context(Member(group.master_addr, group.master_port, terms, signals, order, secret))
        if plan.ends_with_stdin:
            stack.enter_context(watched_stdin(member.lose_input))
        status = _follow(plan, member, signals, attempts, quiet)
    return reported(plan, attempts, status)


def _follow(plan: LaunchPlan, member: Member, signals: socket.socket, attempts: list[Attempt], quiet: bool) -> int:
    """Does what the coordinator says until the run has ended; adds what was run to ``attempts``."""
    order: Start | Wait | End | Interrupted | None = member.connect()
    has_lost_output, notices = False, Notices()
    while True:
        order = member.next_order() if order is None else order
        if isinstance(order, Interrupted):  # of a notice that comes while nothing runs, all is saved that can be
            return REQUEUE if order.number in FORWARDED else shell_status(-order.number)
        if isinstance(order, End):
            if order.reason and not quiet:
                _say(order.reason)
            if order.status and attempts and attempts[-1].is_saved:
                return REQUEUE  # the launcher that led was told to end, and all saved their state
            return order.status or int(has_lost_output)
        if isinstance(order, Wait):
            if not quiet:
                _say(order.reason)
            order = None
            continue
        _announce(plan, order, quiet)
        with Streams(plan.logs, len(attempts), _in_round(plan, order).group.ranks, plan.monitor) as streams:
            stop_requests = member.begin(order)
            try:
                made = attempt(
                    _in_round(plan, order),
                    order.round - 1,
                    streams,
                    signals,
                    stop_requests,
                    can_save=lambda: member.can_save,
                    quiet=quiet,
                    notices=notices,
                )
            finally:
                os.close(stop_requests)
        has_lost_output |= streams.has_lost_output
        attempts.append(made)
        reason = member.stop_reason
        if made.end.is_signalled or member.has_lost_input:
            if made.is_finished:
                member.ended(order, 0, "")
            else:
                member.leaves(made.is_saved)
            show(made, "", quiet)
            return status_of(made)
        show(made, "" if reason is not None else made.sentence(), quiet)
        if reason and not quiet:
            _say(reason)
        failure = made.failure
        is_cause = failure is not None and not failure.while_ending and made.outputs[failure.rank].blames is None
        status = failed_status(failure) if failure is not None and is_cause else status_of(made)
        status = 0 if made.is_finished else status  # also where the round had to end meanwhile
        member.ended(order, status, made.sentence(), is_cause, made.is_saved)
        order = None


def _in_round(plan: LaunchPlan, start: Start) -> LaunchPlan:
    """The plan of this launcher for a round."""
    launchers = Launchers(start.count, start.rank, address=start.address, source="the run's coordinator")
    group = replace(plan.group, launchers=launchers, master_addr=start.address, master_port=start.port)
    return replace(plan, group=group)


def _announce(plan: LaunchPlan, start: Start, quiet: bool) -> None:
    if start.rank == 0 and not quiet:
        machines = f"{start.count} machine{'s' * (start.count > 1)}"
        _say(f"round {start.round}: {machines}, {start.count * plan.group.num_processes} processes")


def _say(sentence: str) -> None:
    say(f"accelerate-cpp: {sentence}")


def _terms(plan: LaunchPlan, elastic: ElasticRun) -> Terms:
    given = dict(elastic.options)
    group = plan.group
    terms = Terms(elastic.least_machines, group.launchers.count, plan.max_restarts, num_processes=group.num_processes)
    interval = given.pop("keep_alive_interval", terms.silence / 3)
    silence = interval * given.pop("keep_alive_max_attempt", 3)
    return replace(
        terms,
        last_call=given.pop("last_call_timeout", terms.last_call),
        join=given.pop("join_timeout", terms.join),
        silence=silence,
        return_delay=given.pop("return_delay", terms.return_delay),
    )


def _is_known(address: str, seconds: float, signals: socket.socket) -> bool:
    """Waits until this machine knows ``address``, which may take until that machine runs.

    Returns:
        Whether it does: not if a signal has come before, which is left to others.

    Raises:
        InvalidArgument: it does not know it after ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
            return True
        except OSError as error:
            if time.monotonic() > deadline:
                raise InvalidArgument(
                    f"{address}, the machine of the launcher that leads the run, is not known to this one "
                    f"({error.strerror}): check --main_process_ip, and that the name is known here"
                ) from None
        if select.select([signals], [], [], RETRY_SECONDS)[0]:
            return False


def _listener(launchers: Launchers, address: str, port: int, is_numbered: bool) -> socket.socket | None:
    """Where this launcher leads the run: that with number 0, else the first on the machine with the address."""
    if is_numbered and launchers.rank != 0:
        return None
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if not is_numbered:  # only a machine that has the address can bind to it
            _bound(family, place).close()
        listener = _bound(family, ("", port))  # others may know this machine by another address of it
        listener.listen(_BACKLOG)
    except OSError as error:
        if not is_numbered and error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None  # it is on another machine, or another launcher of this one leads
        raise InvalidArgument(
            f"the launcher that leads the run cannot listen at {address}, port {port}, of this machine "
            f"({error.strerror}): pass another --main_process_port on all machines, or end the program that uses it"
        ) from None
    return listener


def _bound(family: int, place: Any) -> socket.socket:
    """A socket at ``place``."""
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError:
        bound.close()
        raise
    return bound
