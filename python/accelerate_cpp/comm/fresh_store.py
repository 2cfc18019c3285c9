"""A part of a store to which no earlier attempt at a run has written.

Torch's elastic agents keep one store for all attempts. Without this, a worker that was started again finds the address
of a peer that is dead, before the new one has written its own.

Each call of a rank takes a number, which names it: ``"rank/number"``. Rank 0 proposes a part of the store to the newest
calls of all ranks, and proposes another when a newer call appears. When all have accepted the same part, it announces
that they begin. An answer or a proposal left by a dead process names calls that are not the newest, or a part that no
other rank has accepted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from accelerate_cpp.comm.slow_wait import JoiningWait
from accelerate_cpp.errors import InvalidArgument

_PREFIX = "accelerate_cpp/attempts"
_LONGEST_PAUSE_SECONDS = 0.05


class _Call:
    """One call of :func:`fresh_store`."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.store, self._rank, self.world_size = store, rank, world_size
        self.name = f"{rank}/{store.add(f'{rank}/calls', 1)}"
        self._wait = JoiningWait(rank, world_size, timeout, _LONGEST_PAUSE_SECONDS)

    def newest_of(self, rank: int) -> str:
        """The name of the newest call of ``rank``; empty if there is none."""
        number = self.store.add(f"{rank}/calls", 0)
        return f"{rank}/{number}" if number else ""

    def read(self, key: str) -> str:
        """The value of ``key``; empty if there is none. Does not wait."""
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def require_newest(self) -> None:
        """Raises :class:`InvalidArgument` when another process has taken over this rank."""
        if self.newest_of(self._rank) != self.name:
            raise InvalidArgument(
                f"RANK={self._rank} was started again while this process of the same rank was waiting for the others; "
                "the newer process takes part in the run, so this one ends"
            )

    def missing(self) -> str:
        """The first rank that has never called, or else who knows the one that has not come."""
        absent = next((rank for rank in range(self.world_size) if not self.newest_of(rank)), None)
        return "rank 0, or a rank that it waits for" if absent is None else f"rank {absent}"

    def pause(self, awaited: str | Callable[[], str]) -> None:
        """Waits, a little longer each time; raises when the timeout is over."""
        self.require_newest()
        self._wait.pause(awaited, "check whether it was started and why it ended, or pass a longer timeout")


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Collective: a part of ``store`` to which only this attempt writes.

    A rank that dies after it has accepted, and is then the only one to be restarted, is too late for this attempt: the
    agents also have to restart the others.

    Raises:
        Timeout: a rank did not come; the first that is missing is named. Ranks other than 0 cannot tell which one it
            is if it had come to an earlier attempt.
        InvalidArgument: a newer process has this rank.
    """
    call = _Call(dist.PrefixStore(_PREFIX, store), rank, world_size, timeout)
    part = _propose(call) if rank == 0 else _accept(call)
    return dist.PrefixStore(part, call.store)


def _propose(call: _Call) -> str:
    part, proposals, proposed = "", 0, [""]
    while True:
        present = [call.name, *map(call.newest_of, range(1, call.world_size))]
        if not all(present):
            call.pause(f"rank {present.index('')}")
            continue
        if present != proposed:
            proposals, proposed = proposals + 1, present
            part = f"{call.name}/{proposals}"
            call.store.set(f"{part}/present", json.dumps(present))
        if call.read("proposal") != part:  # always so for a new part; else one from before has overwritten it
            call.store.set("proposal", part)
        accepted = [call.read(name) == part for name in present[1:]]
        if all(accepted):
            call.require_newest()
            call.store.set("begin", part)
            return part
        call.pause(f"rank {accepted.index(False) + 1}")


def _accept(call: _Call) -> str:
    seen = accepted = ""
    while True:
        part = call.read("proposal")
        # After the proposal: rank 0 may have begun with this call, and propose the next part already.
        if accepted and call.read("begin") == accepted:
            return accepted
        if part != seen:
            seen = part
            if call.name in json.loads(call.read(f"{part}/present")):
                call.store.set(call.name, part)
                accepted = part
        call.pause(call.missing)
