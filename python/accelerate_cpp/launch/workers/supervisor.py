"""Watches the workers of a run until all have ended, and ends the rest when one fails or the launch is interrupted."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Protocol

from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.launch.workers.attendance import Absence, Attendance
from accelerate_cpp.launch.workers.failure import Blames, RunEnd, WorkerEnd
from accelerate_cpp.launch.workers.guard import Guard
from accelerate_cpp.launch.workers.news import News, Voice
from accelerate_cpp.launch.workers.notices import Notices
from accelerate_cpp.launch.workers.signals import FORWARDED, INTERRUPTS
from accelerate_cpp.launch.workers.worker import Sink, Worker, exit_code_of_ended, is_stopped, living_members
from accelerate_cpp.runtime.preemption import REQUEUE

REPORT_SECONDS = 1.0
"""After the first failure the others get this long to fail on their own: their errors may name the lost rank."""
CAUSE_SECONDS = 30.0
"""A rank that the errors of the failed ones name gets this long to end: it may be first to fail and last to end. One
that is stopped will not, and gets no time."""
GRACE_SECONDS = 5.0
"""How long workers get to end after each signal before a harder one follows."""
KILLED_SECONDS = 60.0
"""How long the system gets to end what was killed: it may have to release much memory, or wait for a disk."""
SAVING_SECONDS = 600.0
"""How long those get that have said that they save their state, when the launch is interrupted."""
_CHUNK_BYTES = 64 * 1024


class Periodic(Protocol):
    """An object that shows its content from time to time, such as the lines that a console holds."""

    def seconds_left(self) -> float | None:
        """How long until :meth:`show_due` has something to do; ``None`` when nothing waits."""

    def show_due(self) -> None:
        """Shows what is due."""

    def show_all(self) -> None:
        """Shows all there is."""


class Supervisor:
    """Owns the workers added to it. Leaving the context ends whatever still runs, reads the pipes empty, and reaps.

    If this process is killed, the kernel ends the workers, and a guard what they have started in their groups.

    Everything waits in one ``select`` on pidfds, pipes and signals. Ended workers are reaped last, so that signals to
    their process groups never reach other processes. ``signals`` delivers one byte per interrupt, or per signal that
    workers get as well; ``None``: none come.
    ``consoles`` show what they have when it is time, and at the end. The end of the stream ``lifeline`` acts like
    SIGTERM. With ``attendance``, workers that wait for one that has ended are ended, too. ``blames`` returns the ranks
    that the error of a worker names as its cause. With a ``voice``, it tells while the run lasts that it fails.
    ``can_save`` returns whether workers that are ended can still save their state: alone they cannot. ``notices`` may
    be those of the attempt before.
    """

    def __init__(
        self,
        signals: socket.socket | None = None,
        consoles: Sequence[Periodic] = (),
        lifeline: int | None = None,
        attendance: Attendance | None = None,
        blames: Blames = lambda rank: None,
        voice: Voice | None = None,
        can_save: Callable[[], bool] = lambda: True,
        notices: Notices | None = None,
    ) -> None:
        news = [] if voice is None else [News(voice, self._so_far, self._stopped_while_running, blames)]
        self._notices = Notices() if notices is None else notices
        self._consoles: Sequence[Periodic] = [*consoles, *news, self._notices]
        self._attendance = attendance
        self._blames = blames
        self._can_save = can_save
        self._selector = selectors.DefaultSelector()
        self._workers: list[Worker] = []
        self._ends: list[WorkerEnd] = []
        self._interrupts: list[int] = []
        self._has_lost_lifeline = False
        self._outputs: dict[int, Sink] = {}
        self._pidfds: set[int] = set()
        self._watched_members: set[int] = set()
        self._ending = False
        self._guard: Guard | None = None
        if signals is not None:
            self._selector.register(signals, selectors.EVENT_READ, partial(self._on_signal, signals))
        if lifeline is not None:
            self._selector.register(lifeline, selectors.EVENT_READ, partial(self._on_lifeline, lifeline))
        if attendance is not None:
            self._selector.register(attendance.incoming, selectors.EVENT_READ, attendance.read)

    def __enter__(self) -> Supervisor:
        return self

    def add(self, worker: Worker) -> None:
        """Takes over a started worker and the read ends of its pipes."""
        try:
            self._watch(worker.pid, partial(self._on_worker_end, worker))
        except OSError:  # no descriptor left
            os.killpg(worker.pid, signal.SIGKILL)
            worker.reap()
            raise
        self._workers.append(worker)
        for descriptor, sink in worker.outputs.items():
            os.set_blocking(descriptor, False)
            self._outputs[descriptor] = sink
            self._selector.register(descriptor, selectors.EVENT_READ, partial(self._on_output, descriptor))

    def run(self) -> RunEnd:
        """Returns when every worker and every process in its group has ended."""
        self._guard = Guard()  # only now, as it takes a moment that the workers need to start
        for worker in self._workers:
            self._guard.watch(worker.pid)
        self._notices.renew([worker.pid for worker in self._workers])
        self._wait(lambda: self._all_ended or self._any_failed or self._is_interrupted or self._absence())
        absence = self._absence()
        self._wait(lambda: self._all_ended or self._is_interrupted or absence, REPORT_SECONDS)
        # A signal to all processes may come to the workers first. One that comes later is not why the run has failed.
        has_failed = not self._is_interrupted and bool(self._any_failed or absence)
        self._wait(lambda: self._all_ended or self._is_interrupted or not self._cause_lives(), CAUSE_SECONDS)
        by_keyboard = self._interrupts[:1] == [signal.SIGINT]
        ladder = (signal.SIGINT, signal.SIGTERM) if by_keyboard else (signal.SIGTERM,)
        stopped = self._stopped()
        self._end(ladder)
        interrupt = next(iter(self._interrupts), signal.SIGTERM if self._has_lost_lifeline else None)
        return RunEnd(
            tuple(self._ends),
            None if has_failed else interrupt,
            absence,
            stopped,
            is_signalled=bool(self._interrupts),
            is_last=self._is_interrupted,
            savers=frozenset(self._savers()),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._end(())
            for descriptor in list(self._outputs):
                self._read_to_the_end(descriptor)
            for console in self._consoles:
                console.show_all()
        finally:
            if self._guard is not None:
                self._guard.dismiss()
            ended = {end.rank for end in self._ends}
            for worker in self._workers:
                if worker.rank in ended:
                    worker.reap()
            for descriptor in [*self._outputs, *self._pidfds]:
                os.close(descriptor)
            self._selector.close()

    @property
    def _all_ended(self) -> bool:
        return len(self._ends) == len(self._workers)

    @property
    def _is_interrupted(self) -> bool:
        return bool(self._interrupts) or self._has_lost_lifeline

    @property
    def _any_failed(self) -> bool:
        return any(end.exit_code != 0 and not self._has_saved(end) for end in self._ends)

    def _has_saved(self, end: WorkerEnd) -> bool:
        """Whether a worker has left after it saved its state, as the others are about to."""
        return end.exit_code == REQUEUE and end.rank in self._savers()

    def _savers(self) -> set[int]:
        if self._attendance is None:
            return set()
        self._attendance.read()  # what a worker announced is there before its end
        return self._attendance.savers

    def _cause_lives(self) -> bool:
        """Whether the errors of all that have failed name one that lives, and may end by itself."""
        blamed = [self._blames(end.rank) for end in self._ends if end.exit_code != 0 and not self._has_saved(end)]
        living = self._living_ranks() - self._stopped()
        named = {rank for ranks in blamed for rank in ranks or ()}
        return None not in blamed and not living.isdisjoint(named)

    def _living_ranks(self) -> set[int]:
        return {worker.rank for worker in self._workers}.difference(end.rank for end in self._ends)

    def _stopped(self) -> frozenset[int]:
        """The workers that something has stopped: they do not end by themselves."""
        living = self._living_ranks()
        return frozenset(one.rank for one in self._workers if one.rank in living and is_stopped(one.pid))

    def _stopped_while_running(self) -> dict[int, bool]:
        """Of each worker that lives, whether a signal has stopped it; empty once they have been told to end."""
        living = frozenset() if self._ending else self._living_ranks()
        return {one.rank: is_stopped(one.pid, by_signal=True) for one in self._workers if one.rank in living}

    def _so_far(self) -> RunEnd | None:
        """How the run ends, as far as is known; ``None`` if nothing says that it fails, or it is interrupted.

        A worker that an error ends has not ended by then.
        """
        absence = self._absence()
        ended = {end.rank for end in self._ends}
        raised = [] if self._attendance is None else [rank for rank in self._attendance.raised if rank not in ended]
        if self._is_interrupted or not (raised or absence or self._any_failed):
            return None
        ends = (*self._ends, *(WorkerEnd(rank, 1, False) for rank in raised))
        return RunEnd(ends, None, absence, self._stopped(), savers=frozenset(self._savers()))

    def _absence(self) -> Absence | None:
        """The worker that the others wait for although it has ended, if no worker has failed."""
        if self._attendance is None or not self._ends or self._any_failed:
            return None
        self._attendance.read()  # what a worker announced is there before its end
        return self._attendance.absence([end.rank for end in self._ends])

    def _wait(self, until: Callable[[], object], seconds: float | None = None) -> None:
        """Handles events until ``until()`` is true or ``seconds`` have passed."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not until():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            held = [left for console in self._consoles if (left := console.seconds_left()) is not None]
            for key, _ in self._selector.select(
                min([*held, *([] if remaining is None else [remaining])], default=None)
            ):
                key.data()
            for console in self._consoles:
                console.show_due()

    def _end(self, ladder: tuple[signal.Signals, ...]) -> None:
        """Sends each of ``ladder`` in turn while something lives, and at last SIGKILL.

        SIGINT goes to whole groups, as from a terminal. SIGTERM goes to the workers, and to the rest of their groups
        when these have ended or their time is over: a worker may clean up, and would be disturbed by torch, which
        raises an error in it when a process of a data loader is killed. A further interrupt leads to SIGKILL at once;
        after the end of the lifeline, the first signal asks for nothing else.
        """
        self._ending = True
        patient = max(len(self._interrupts), int(self._has_lost_lifeline))

        def goes_on() -> bool:
            return self._anything_lives() and len(self._interrupts) <= patient

        for number in ladder:
            if not goes_on():
                break
            if number != signal.SIGTERM:
                self._signal_groups(number)
            else:
                for worker in self._workers:
                    os.kill(worker.pid, number)
                    os.kill(worker.pid, signal.SIGCONT)  # one that is stopped acts on nothing before
                self._wait(lambda: self._all_ended or not goes_on(), GRACE_SECONDS)
                deadline = time.monotonic() + SAVING_SECONDS
                while goes_on() and self._is_saving() and time.monotonic() < deadline:
                    self._wait(lambda: self._all_ended or not goes_on(), GRACE_SECONDS)
                if not goes_on() or not self._signal_rest_of_groups(number):
                    break
            self._wait(lambda: not goes_on(), GRACE_SECONDS)
        if not self._anything_lives():
            return
        self._signal_groups(signal.SIGKILL)
        self._wait(lambda: not self._anything_lives(), KILLED_SECONDS)
        if self._anything_lives():
            raise SystemFailure(
                f"processes {self._living()} are still alive {KILLED_SECONDS:g} s after SIGKILL: check their state"
            )

    def _is_saving(self) -> bool:
        """Whether workers that were told to end may be saving their state, all of them together."""
        saving = not self._savers().isdisjoint(self._living_ranks())
        return self._is_interrupted and saving and not self._any_failed and self._can_save()

    def _signal_groups(self, number: signal.Signals) -> None:
        for worker in self._workers:
            os.killpg(worker.pid, number)
            os.killpg(worker.pid, signal.SIGCONT)

    def _signal_rest_of_groups(self, number: signal.Signals) -> bool:
        """Signals what the workers have started; they themselves were signalled before. Returns whether any lived."""
        workers = {worker.pid for worker in self._workers}
        rest = [pid for pid in self._living() if pid not in workers]
        for pid in rest:
            with suppress(ProcessLookupError):  # ended since it was listed
                os.kill(pid, number)
        return bool(rest)

    def _living(self) -> list[int]:
        """The processes in the groups of all workers."""
        return living_members({worker.pid for worker in self._workers})

    def _anything_lives(self) -> bool:
        """Whether a worker, or a process that it left in its group, lives. The latter is watched from now on."""
        if not self._all_ended:
            return True
        members = self._living()
        for pid in members:
            if pid not in self._watched_members:
                try:
                    self._watch(pid, partial(self._watched_members.discard, pid))
                except ProcessLookupError:  # ended since it was listed
                    continue
                self._watched_members.add(pid)
        return bool(members)

    def _watch(self, pid: int, on_end: Callable[[], None]) -> None:
        """Calls ``on_end`` once when process ``pid`` has ended."""
        pidfd = os.pidfd_open(pid)
        self._pidfds.add(pidfd)
        self._selector.register(pidfd, selectors.EVENT_READ, partial(self._on_end, pidfd, on_end))

    def _on_end(self, pidfd: int, on_end: Callable[[], None]) -> None:
        self._selector.unregister(pidfd)
        self._pidfds.remove(pidfd)
        os.close(pidfd)
        on_end()

    def _on_worker_end(self, worker: Worker) -> None:
        self._ends.append(WorkerEnd(worker.rank, exit_code_of_ended(worker.pid), self._ending, time.time()))

    def _on_signal(self, signals: socket.socket) -> None:
        for number in signals.recv(_CHUNK_BYTES):
            if number in INTERRUPTS:
                self._interrupts.append(number)
            elif number in FORWARDED:
                self._notices.add(number, [worker.pid for worker in self._workers])

    def _on_lifeline(self, lifeline: int) -> None:
        if not os.read(lifeline, _CHUNK_BYTES):
            self._selector.unregister(lifeline)
            self._has_lost_lifeline = True

    def _on_output(self, descriptor: int) -> bool:
        """Passes one chunk on, and returns whether more can come."""
        chunk = os.read(descriptor, _CHUNK_BYTES)
        sink = self._outputs[descriptor]
        if not chunk:
            self._selector.unregister(descriptor)
            del self._outputs[descriptor]
            os.close(descriptor)
        sink(chunk)
        return bool(chunk)

    def _read_to_the_end(self, descriptor: int) -> None:
        """Takes what is left in a pipe without waiting: a process outside our groups may hold its other end open."""
        try:
            while self._on_output(descriptor):
                pass
        except BlockingIOError:
            self._outputs[descriptor](b"")
