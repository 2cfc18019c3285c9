"""Which launchers take part in an elastic run, and when they start again: decisions only, without sockets or clocks.

A *round* is a run of the workers of some launchers with fixed ranks. It ends for all when one of its launchers is lost
or fails, or when another comes; the next one begins with those who are there. A failure counts as a restart unless a
launcher was lost, left or came: its workers' errors are consequences of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from accelerate_cpp.launch.elastic.messages import Message, Misunderstood, number_in, text_in
from accelerate_cpp.launch.elastic.returns import Returns
from accelerate_cpp.runtime.preemption import REQUEUE

SETTLE_SECONDS = 1.0
"""After a round, how long nothing may change before the next one begins with fewer launchers than there can be."""

ARRIVAL_SECONDS = 5.0
"""After one launcher has come, how long a round goes on to let others come with it, where there is room for more."""

CAUSE_SECONDS = 30.0
"""How long launchers get to tell of a failure of their own after one whose workers blame others: it may end last."""


@dataclass(frozen=True)
class Terms:
    """What a run may do.

    Attributes:
        least: the number of launchers that are enough; ``most``: how many take part at once.
        max_restarts: how many failures may happen.
        last_call: seconds that the first round waits for more launchers when there are enough.
        join: seconds that a round waits for enough of them.
        silence: seconds after which a launcher that says nothing is lost.
        return_delay: seconds that a machine waits which was lost twice in a short time; see :class:`Returns`.
        num_processes: of each launcher.
    """

    least: int
    most: int
    max_restarts: int = 0
    last_call: float = 30.0
    join: float = 600.0
    silence: float = 15.0
    return_delay: float = 30.0
    num_processes: int = 1


@dataclass
class _Launcher:
    name: str
    address: str
    order: int
    heard: float
    came: float
    takes_part_since: float | None = None
    ended: bool = False
    status: int | None = None
    has_saved: bool = False  # its workers have saved the state of the run and left
    leaves: bool = False  # it was told to end, and its workers have saved the state of the run


@dataclass(frozen=True)
class _Failure:
    status: int
    sentence: str
    is_cause: bool  # it blames no other rank


class _Phase(Enum):
    GATHERING = auto()
    OFFERED = auto()
    RUNNING = auto()
    STOPPING = auto()
    OVER = auto()


@dataclass
class Rounds:
    """The rounds of one run. Times are seconds of any clock that goes forwards.

    Attributes:
        outbox: what is to be sent, and to which launcher; the owner takes it out.
    """

    terms: Terms
    began: float
    outbox: list[tuple[int, Message]] = field(default_factory=list)
    _launchers: dict[int, _Launcher] = field(default_factory=dict)
    _round: int = 0
    _members: list[int] = field(default_factory=list)
    _began_with: int = 0  # so many members, of which those that end well may leave
    _phase: _Phase = _Phase.GATHERING
    _changed: float = 0.0
    _restarts: int = 0
    _is_disturbed: bool = False  # a launcher of this round was lost, left or came
    _lacks_work: bool = False  # one was lost, or left, before its workers had ended well
    _failure: _Failure | None = None
    _stop_at: float = math.inf
    _stop_reason: str = ""
    _can_save: bool = False

    def __post_init__(self) -> None:
        self._changed = self.began
        self._returns = Returns(self.terms.return_delay)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended for all."""
        return self._phase is _Phase.OVER

    def join(self, number: int, hello: Message, address: str, now: float) -> None:
        """Launcher ``number``, which is at ``address``, has said ``hello``.

        Raises:
            Misunderstood: it lacks something.
        """
        size = number_in(hello, "num_processes"), number_in(hello, "most")
        launcher = _Launcher(text_in(hello, "name"), address, number_in(hello, "order"), heard=now, came=now)
        if size != (self.terms.num_processes, self.terms.most):
            reason = (
                f"the launcher on {launcher.name} cannot take part: it starts {size[0]} processes as one of at most "
                f"{size[1]}, those of this run start {self.terms.num_processes} as one of at most {self.terms.most}; "
                "pass the same --num_processes and --num_machines on all machines, and to another run another "
                "--main_process_port"
            )
            self.outbox.append((number, {"do": "end", "status": 1, "reason": reason}))
            return
        self._launchers[number] = launcher
        if self._phase is _Phase.OVER:
            self.outbox.append((number, {"do": "end", "status": 1, "reason": "the run has ended"}))
        elif self._returns.waits(launcher.name, now):
            self.outbox.append((number, {"do": "wait", "reason": self._returns.reason(launcher.name, now)}))
        elif self._phase is _Phase.GATHERING:
            self._changed = now
        elif len(self._members) < self.terms.most and self._phase is _Phase.OFFERED:
            self._gather(now)
        self.look(now)

    def lose(self, number: int, now: float, how: str = "is gone") -> None:
        """The connection with launcher ``number`` has ended, or it has been silent for too long."""
        launcher = self._launchers.pop(number, None)
        if launcher is None:
            return
        if self._phase is _Phase.GATHERING:
            self._changed = now
        if number in self._members:
            self._members.remove(number)
            if launcher.status != 0:
                self._is_disturbed = self._lacks_work = True
            if launcher.takes_part_since is not None and launcher.status != 0 and not launcher.leaves:
                self._returns.lose(launcher.name, launcher.takes_part_since, now)
            if self._phase is _Phase.OFFERED:
                self._gather(now)
            elif (self._phase is _Phase.RUNNING and launcher.status != 0) or (
                self._phase is _Phase.STOPPING and not launcher.ended and not launcher.leaves
            ):  # also those that may have been saving cannot any more
                self._stop(f"the launcher on {launcher.name} {how}", can_save=False)
        self.look(now)

    def hear(self, number: int, message: Message, now: float) -> None:
        """Launcher ``number`` has said ``message``. What one says that was taken for lost changes nothing.

        Raises:
            Misunderstood: it is not one of those that launchers say.
        """
        launcher = self._launchers.get(number)
        if launcher is None:
            return
        launcher.heard = now
        said = message.get("say")
        if said == "alive":
            return
        if said == "leaves":
            launcher.leaves = message.get("has_saved") is True
            if number in self._members:
                self._is_disturbed = True
                if self._phase is _Phase.RUNNING:
                    self._stop(f"the launcher on {launcher.name} was told to end", can_save=launcher.leaves)
                elif not launcher.leaves:
                    self._save_no_more()
            return
        if number_in(message, "round") != self._round or number not in self._members:
            return  # of a round that is over
        if said == "port":
            self._start(number_in(message, "port", 1, 65535))
        elif said == "ended":
            launcher.ended, launcher.status = True, number_in(message, "status", 0, 255)
            launcher.has_saved = message.get("has_saved") is True
            if launcher.status != 0 and not launcher.has_saved:
                failure = _Failure(launcher.status, text_in(message, "sentence"), message.get("is_cause") is True)
                if self._failure is None or (failure.is_cause and not self._failure.is_cause):
                    self._failure = failure
            if launcher.has_saved or (self._failure is not None and self._failure.is_cause):
                self._stop_at = now
            elif launcher.status != 0:
                self._stop_at = min(self._stop_at, now + CAUSE_SECONDS)
        elif said == "stopped":
            launcher.ended, launcher.has_saved = True, message.get("has_saved") is True
            if number_in(message, "status", 0, 255) == 0:  # they had ended well before they could be stopped
                launcher.status = 0
            elif not launcher.has_saved:
                self._save_no_more()
        else:
            raise Misunderstood(f"'say': expected alive, leaves, port, ended or stopped, found {said!r:.80}")
        self.look(now)

    def excuse(self, seconds: float) -> None:
        """For so long nobody could be heard, whatever was said."""
        for launcher in self._launchers.values():
            launcher.heard += seconds

    def look(self, now: float) -> None:
        """Does what is due at this time."""
        for number, launcher in list(self._launchers.items()):
            if now - launcher.heard > self.terms.silence:
                silent = f"has said nothing for {self.terms.silence:g} s"
                reason = f"this launcher {silent}, and the run goes on without it; start it again to take part"
                self.outbox.append((number, {"do": "end", "status": 1, "reason": reason}))
                self.lose(number, now, silent)
        if self._phase is _Phase.GATHERING:
            self._begin_if_ready(now)
        elif self._phase in (_Phase.RUNNING, _Phase.STOPPING) and self._all_ended():
            self._conclude(now)
        elif self._phase is _Phase.RUNNING and now >= self._stop_at:
            self._stop("", can_save=any(self._launchers[number].has_saved for number in self._members))
        elif self._phase is _Phase.RUNNING and (comers := self._comers(now)):
            self._is_disturbed = True
            self._stop(f"{' and '.join(comers)} ha{'ve' if len(comers) > 1 else 's'} come", can_save=True)

    def _all_ended(self) -> bool:
        return all(self._launchers[number].ended for number in self._members)

    def _comers(self, now: float) -> list[str]:
        """The names of launchers that the round in progress ends for, now that all have come that come together."""
        room = self.terms.most - self._began_with
        others = [self._launchers[number] for number in self._launchers if number not in self._members]
        others = [launcher for launcher in others if not self._wait_of(launcher, now)][:room]
        are_all = len(others) == room or all(now - launcher.came >= ARRIVAL_SECONDS for launcher in others)
        return [launcher.name for launcher in others] if are_all else []

    def _wait_of(self, launcher: _Launcher, now: float) -> float:
        """For how many seconds it does not take part: one that has done so since it came waits no more."""
        return 0.0 if launcher.takes_part_since is not None else self._returns.waits(launcher.name, now)

    def _candidates(self, now: float) -> list[int]:
        """Who can take part in a round that begins now: of those that wait, as many as it cannot do without."""
        ordered = sorted(self._launchers, key=lambda number: (self._launchers[number].order, number))
        waits = {number: self._wait_of(self._launchers[number], now) for number in ordered}
        soonest = sorted(ordered, key=lambda number: waits[number])
        chosen = soonest[: max(self.terms.least, sum(wait == 0 for wait in waits.values()))]
        return [number for number in ordered if number in chosen]

    def _begin_if_ready(self, now: float) -> None:
        candidates, terms = self._candidates(now), self.terms
        present = len(candidates)
        patience = terms.last_call if self._round == 0 else SETTLE_SECONDS
        if present >= terms.most or (present >= terms.least and now - self._changed >= patience):
            self._round += 1
            self._members = candidates[: terms.most]
            self._began_with = len(self._members)
            for number in self._members:
                launcher = self._launchers[number]
                launcher.ended, launcher.status, launcher.has_saved = False, None, False
                if launcher.takes_part_since is None:
                    launcher.takes_part_since = now
            self._is_disturbed, self._lacks_work, self._failure = False, False, None
            self._stop_at, self._phase = math.inf, _Phase.OFFERED
            self.outbox.append((self._members[0], {"do": "offer", "round": self._round}))
        elif present < terms.least and now - self._changed > terms.join:
            self._end(1, f"{present} of at least {terms.least} machines were there for {terms.join:g} s")

    def _start(self, port: int) -> None:
        """The first member has offered a port for the store of the round."""
        if self._phase is not _Phase.OFFERED:
            return
        self._phase = _Phase.RUNNING
        address = self._launchers[self._members[0]].address
        for rank, number in enumerate(self._members):
            order = {"rank": rank, "count": len(self._members), "address": address, "port": port}
            self.outbox.append((number, {"do": "start", "round": self._round, **order}))

    def _stop(self, reason: str, can_save: bool) -> None:
        """The workers have to end. They can save their state before if all of them are there."""
        self._phase, self._stop_reason, self._can_save = _Phase.STOPPING, reason, can_save
        for number in self._members:
            if not self._launchers[number].ended:
                order = {"do": "stop", "round": self._round, "reason": reason, "can_save": can_save}
                self.outbox.append((number, order))

    def _save_no_more(self) -> None:
        """Workers have ended without saving, so those of the others wait for them in vain."""
        if self._phase is _Phase.STOPPING and self._can_save:
            self._stop(self._stop_reason, can_save=False)

    def _conclude(self, now: float) -> None:
        """All launchers of the round have ended their workers."""
        members = [self._launchers[number] for number in self._members]
        if members and all(member.status == 0 for member in members) and not self._lacks_work:
            self._end(0, "")
        elif members and all(member.has_saved for member in members) and not self._is_disturbed:
            self._end(REQUEUE, "all have saved their state and left, to be started again")
        elif self._failure is not None and not self._is_disturbed and self._restarts >= self.terms.max_restarts:
            self._end(self._failure.status, self._failure.sentence)
        else:
            self._restarts += self._failure is not None and not self._is_disturbed
            self._gather(now)

    def _gather(self, now: float) -> None:
        self._members, self._phase, self._changed = [], _Phase.GATHERING, now

    def _end(self, status: int, reason: str) -> None:
        self._phase = _Phase.OVER
        for number in self._launchers:
            self.outbox.append((number, {"do": "end", "status": status, "reason": reason}))
