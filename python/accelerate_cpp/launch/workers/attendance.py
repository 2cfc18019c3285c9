"""Which workers have joined their process group, and whether others wait there for one that has ended.

A worker that ends well before it has joined a group leaves the others waiting for their whole timeout. Workers say
when they begin to join and when they have joined (:mod:`accelerate_cpp.comm.joining`); one that joins no group reports
nothing, and no worker waits for it. They also say that they save their state before they end, and that an error does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from accelerate_cpp.comm.joining import BEGINS, GAVE_UP, JOINED, MESSAGE, RAISED, SAVES
from accelerate_cpp.config import env_table

_CHUNK_BYTES = MESSAGE.size * 4096


@dataclass(frozen=True)
class Absence:
    """A worker that ended well, and those that wait for it to join their group."""

    worker: int
    waiting: Sequence[int]


@dataclass
class _Joins:
    """How many groups a worker has begun to join, and joined: the first, or one more after destroying it."""

    begun: int = 0
    done: int = 0


@dataclass
class Attendance:
    """The launcher's side. Workers are known by the numbers that the supervisor has for them.

    Attributes:
        descriptor: what workers inherit, the end of the pipe to write to.
        incoming: the end of the pipe to read from.
        savers: the workers that save their state when they are told to end.
        raised: the workers that an error ends, in the order in which they said so.
    """

    descriptor: int
    incoming: int
    savers: set[int] = field(default_factory=set)
    raised: list[int] = field(default_factory=list)
    _joins: dict[int, _Joins] = field(default_factory=dict)
    _started: set[int] = field(default_factory=set)
    _rest: bytes = b""

    def variables(self, worker: int) -> dict[str, str]:
        """What tells the worker with this number where to announce itself."""
        self._started.add(worker)
        place = (self.descriptor, os.fstat(self.descriptor).st_ino, worker)
        return env_table.render({env_table.JOINING: place})

    def read(self) -> None:
        """Reads the announcements; what a program has written there by mistake is not taken for one of a worker."""
        try:
            while chunk := os.read(self.incoming, _CHUNK_BYTES):
                chunk = self._rest + chunk
                whole = len(chunk) - len(chunk) % MESSAGE.size
                self._rest = chunk[whole:]
                for worker, event in MESSAGE.iter_unpack(chunk[:whole]):
                    if worker not in self._started:
                        continue
                    joins = self._joins.setdefault(worker, _Joins())
                    joins.begun += {BEGINS: 1, GAVE_UP: -1}.get(event, 0)
                    joins.done += event == JOINED
                    if event == SAVES:
                        self.savers.add(worker)
                    elif event == RAISED and worker not in self.raised:
                        self.raised.append(worker)
        except BlockingIOError:
            return

    def absence(self, ended: Collection[int]) -> Absence | None:
        """The first of the workers ``ended`` that living ones wait for; ``None`` if they wait for none of them."""
        waiting = {
            worker: joins.begun
            for worker, joins in self._joins.items()
            if worker not in ended and joins.begun > joins.done
        }
        for worker in ended:
            by = [one for one, number in waiting.items() if self._joins.get(worker, _Joins()).done < number]
            if by:
                return Absence(worker, sorted(by))
        return None


@contextmanager
def attendance() -> Iterator[Attendance]:
    """The attendance of workers that are about to be started."""
    incoming, descriptor = os.pipe()
    os.set_blocking(incoming, False)
    try:
        yield Attendance(descriptor, incoming)
    finally:
        os.close(incoming)
        os.close(descriptor)
