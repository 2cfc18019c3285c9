"""Ranks as threads of one process, for what saves and loads and asks the others for nothing but values."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from accelerate_cpp.checkpoint.participants import Participants
from accelerate_cpp.comm.topology import Topology
from accelerate_cpp.errors import PeerLost

T = TypeVar("T")
_PATIENCE_SECONDS = 120  # after which a test has failed


class Exchange:
    """Where the ranks leave their values for each other, until one is lost."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=_PATIENCE_SECONDS)
        self._values: list[Any] = [None] * world_size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        try:
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("a rank has ended") from None
        return values

    def lose_one(self) -> None:
        """Those that wait, and all that will, raise ``PeerLost``."""
        self._barrier.abort()


@dataclass(frozen=True)
class ThreadRank(Participants):
    """One of the ranks."""

    exchange: Exchange | None = None

    def gather(self, value: Any) -> list[Any]:
        assert self.exchange is not None
        return self.exchange.gather(self.place, value)


def ranks_of(hosts: Sequence[int]) -> list[ThreadRank]:
    """One for each of ``hosts``, which are as many numbers; all hosts have as many ranks."""
    exchange, local_world_size = Exchange(len(hosts)), hosts.count(hosts[0])
    return [
        ThreadRank(Topology(rank, len(hosts), hosts[:rank].count(host), local_world_size), exchange=exchange)
        for rank, host in enumerate(hosts)
    ]


def outcomes(ranks: Sequence[Participants], function: Callable[[Any], T]) -> list[T | Exception]:
    """Calls ``function`` with each of ``ranks`` at once; what it returned for each, or the exception."""

    def outcome(one: Participants) -> T | Exception:
        try:
            return function(one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(outcome, ranks))


def await_event(event: threading.Event) -> None:
    """Fails the test if ``event`` does not come."""
    assert event.wait(_PATIENCE_SECONDS), "the other rank did not come that far"
