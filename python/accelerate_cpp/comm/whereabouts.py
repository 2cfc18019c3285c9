"""Finds out over the store which ranks are in a call, for torch's backends, whose collectives cannot be observed.

A rank that meets the others writes a *call* into the store: its topic, and how many collectives it has issued. A thread
of each rank answers for it: here, if the rank is in a call on that topic; elsewhere, if it has issued another
collective since, or ends, or is in a call on another topic, in which case the lower rank goes first. No rank leaves a
call before all ranks in it know who is in it.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accelerate_cpp.comm.slow_wait import SlowWait
from accelerate_cpp.comm.stores import kept
from accelerate_cpp.errors import PeerLost, Timeout

_ELSEWHERE = "elsewhere"
_FAST_SECONDS = 0.005
_SLOW_SECONDS = 0.1
_SECONDS_PER_RANK = 0.0005  # of the pause between checks: one process answers all of them
_LAST_SECONDS = 5.0


@dataclass(frozen=True)
class _Call:
    number: int
    rank: int
    topic: str
    issued: int


class Whereabouts:
    """Finds ranks of one group. Created once by each of them; call :meth:`end` before the interpreter ends.

    Args:
        store: common to all ranks, and used for nothing else.
        issued: how many collectives this rank has issued, ``None`` when there will be no more. Called by a thread.
        timeout: of a meeting.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, issued: Callable[[], int | None], timeout: timedelta
    ) -> None:
        # Two, as a blocked operation of one does not block the other.
        self._stores: list[dist.Store] = [store, kept(store.clone())]  # type: ignore[attr-defined]
        self._rank, self._world_size, self._issued, self._timeout = rank, world_size, issued, timeout
        self._pause_seconds = max(_SLOW_SECONDS, world_size * _SECONDS_PER_RANK)
        self._own: _Call | None = None
        self._lost_one, self._reason = False, ""
        self._ended, self._wake = False, threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="accelerate-cpp-whereabouts", daemon=True)
        self._thread.start()

    def meet(self, topic: str) -> list[int]:
        """The ranks that are in a call on ``topic``, in order. Waits until that is known of all.

        Raises:
            PeerLost: a rank has ended with an error, and might have come, or the store has gone with its process.
                Raised once; later, nobody else is there.
            Timeout: it is not known of a rank within the timeout.
        """
        if self._lost_one:
            return [self._rank]
        try:
            return self._meet(topic, self._stores[0])
        except dist.DistNetworkError as error:
            self._lost_one = True
            raise PeerLost(
                f"rank {self._rank} waited for the others, but a rank has left the group: its store, which rank 0 "
                "holds unless the launcher does, has gone with its process"
            ) from error

    def someone_has_left(self) -> bool:
        """Whether a rank is known to have ended in good order, or the store has gone with its process."""
        store = self._stores[0]
        gone = [f"gone/{peer}" for peer in range(self._world_size) if peer != self._rank]
        try:
            return any(store.check([key]) and not store.get(key) for key in gone)
        except dist.DistNetworkError:
            return True

    def end(self, error: BaseException | None = None) -> None:
        """Ends the answers for this rank: in good order, or because of ``error``."""
        if error is not None:
            first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._reason = f"its program ended with {first_line.removesuffix(': ')}"
        self._ended = True
        self._wake.set()
        self._thread.join(_LAST_SECONDS)  # the store may be out of reach
        if not self._thread.is_alive():
            self._stores.clear()

    def _meet(self, topic: str, store: dist.Store) -> list[int]:
        own = _Call(store.add("calls", 1) - 1, self._rank, topic, self._issued() or 0)
        self._own = own
        self._wake.set()
        try:
            store.set(f"call/{own.number}", json.dumps([own.rank, own.topic, own.issued]))
            answers = {peer: self._answer_of(own, peer, store) for peer in range(self._world_size) if peer != own.rank}
            here = {peer: int(number) for peer, number in answers.items() if number != _ELSEWHERE}
            store.set(f"done/{own.number}", "")
            for peer, number in here.items():
                self._await_one_of(f"done/{number}", peer, store)
        finally:
            self._own = None
        return sorted([*here, self._rank])

    def _answer_of(self, call: _Call, peer: int, store: dist.Store) -> str:
        key = f"answer/{call.number}/{peer}"
        return store.get(key).decode() if self._await_one_of(key, peer, store) else _ELSEWHERE

    def _await_one_of(self, key: str, peer: int, store: dist.Store) -> bool:
        """Whether ``key`` comes before ``peer`` goes; :class:`PeerLost` if that ends with an error instead."""
        self._await(lambda: store.check([key]) or store.check([f"gone/{peer}"]), peer)
        if store.check([key]):
            return True
        if reason := store.get(f"gone/{peer}").decode():
            self._lost_one = True
            raise PeerLost(f"rank {self._rank} waited for rank {peer}: rank {peer} failed: {reason}")
        return False

    def _await(self, condition: Callable[[], bool], peer: int) -> None:
        wait = SlowWait(self._rank, self._world_size)
        while not condition():
            wait.report(f"rank {peer}")
            if wait.seconds > self._timeout.total_seconds():
                raise Timeout(wait.sentence(f"rank {peer}") + ", which neither came nor called another collective")
            time.sleep(_FAST_SECONDS)

    def _answer_all(self) -> None:
        store = self._stores[1]
        open_calls: list[_Call] = []
        number = 0
        try:
            while not self._ended and (issued := self._issued()) is not None:
                while store.check([f"call/{number}"]):
                    rank, topic, then = json.loads(store.get(f"call/{number}"))
                    open_calls += [_Call(number, rank, topic, then)] if rank != self._rank else []
                    number += 1
                open_calls = [call for call in open_calls if not self._answered(call, issued, store)]
                self._wake.wait(_FAST_SECONDS if open_calls or self._own else self._pause_seconds)
                self._wake.clear()
            store.set(f"gone/{self._rank}", self._reason)
        except RuntimeError:
            return  # the store has ended with its process: no rank asks any more, and this one learns it when it does
        self._stores.clear()  # one of them may keep a port open

    def _answered(self, call: _Call, issued: int, store: dist.Store) -> bool:
        own = self._own
        if own is not None and (own.topic, own.issued) == (call.topic, call.issued):
            answer = str(own.number)
        elif issued > call.issued or (own is not None and call.rank < self._rank):
            answer = _ELSEWHERE
        else:
            return False
        store.set(f"answer/{call.number}/{self._rank}", answer)
        return True


_of_group: tuple[weakref.ref[Any], Whereabouts] | None = None


def end_whereabouts(error: BaseException | None = None) -> None:
    """Ends those of the default group, if there are any, in good order or because of ``error``."""
    global _of_group
    if _of_group is not None:
        _of_group[1].end(error)
        _of_group = None


def whereabouts(timeout: timedelta) -> Whereabouts | None:
    """Where the ranks of the default group are; all of them call this. ``None`` if its backends do not count."""
    global _of_group
    world: Any = dist.group.WORLD
    if _of_group is not None and _of_group[0]() is world:
        return _of_group[1]
    end_whereabouts()
    if world.name() == "fake":  # torch's group of one process that plays several, whose store keeps nothing
        return None
    try:
        _issued_by(world)
    except RuntimeError:
        return None
    group, rank = weakref.ref(world), dist.get_rank()
    shared = dist.distributed_c10d._get_default_store()
    number = shared.add(f"accelerate_cpp/whereabouts/{rank}", 1)  # groups may follow one another in a store
    store = dist.PrefixStore(f"accelerate_cpp/whereabouts/{number}/", shared)

    def issued() -> int | None:
        current = group()
        return None if current is None else _issued_by(current)

    _of_group = group, Whereabouts(store, rank, dist.get_world_size(), issued, timeout)
    return _of_group[1]


def _issued_by(group: Any) -> int:
    backends = {id(backend): backend for backend in (group._get_backend(device) for device in group._device_types)}
    return sum(backend._get_sequence_number_for_group() for backend in backends.values())
