"""A part of a store to which no earlier attempt at a run has written.

Torch's elastic agents keep one store for all attempts. Without this, a worker that was started again finds the address
of a peer that is dead, before the new one has written its own.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from accelerate_cpp.errors import Timeout

_PREFIX = "accelerate_cpp/attempts"
_LONGEST_PAUSE_SECONDS = 0.05


class _Waiting:
    """Pauses that become longer, until a deadline."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout, self._deadline = timeout, time.monotonic() + timeout.total_seconds()
        self._pause = 0.001

    def pause(self, awaited: str) -> None:
        """Raises :class:`Timeout` with ``awaited`` after the deadline."""
        if time.monotonic() > self._deadline:
            raise Timeout(
                f"the processes of this run did not meet within {self._timeout.total_seconds():g} s: waited for "
                f"{awaited}; look whether it was started and why it ended, or pass a longer timeout"
            )
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)


def _read(store: dist.Store, key: str) -> str:
    """What ``key`` has; empty if there is none. Does not wait."""
    return store.get(key).decode() if store.check([key]) else ""


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Collective: a part of ``store`` that only the present processes of all ranks use.

    Each process has a name that none had before. Rank 0 proposes a part to those that it finds, again when a rank has
    been started anew; when all have accepted the same one, it says that this is it.

    Raises:
        Timeout: a rank did not come; it is named.
    """
    store = dist.PrefixStore(_PREFIX, store)
    name, waiting = uuid.uuid4().hex, _Waiting(timeout)
    part = _propose(store, name, world_size, waiting) if rank == 0 else _accept(store, name, rank, waiting)
    return dist.PrefixStore(part, store)


def _propose(store: dist.Store, name: str, world_size: int, waiting: _Waiting) -> str:
    part, proposed = "", [""]
    while True:
        answers = [_read(store, str(peer)).partition(" ") for peer in range(1, world_size)]
        present = [name, *(peer for peer, _, _ in answers)]
        if not all(present):
            waiting.pause(f"rank {present.index('')}")
            continue
        if present != proposed:
            part, proposed = uuid.uuid4().hex, present
            store.set("proposal", json.dumps([part, present]))
        accepted = [answer == part for _, _, answer in answers]
        if all(accepted):
            store.set("begin", part)
            return part
        waiting.pause(f"rank {accepted.index(False) + 1}")


def _accept(store: dist.Store, name: str, rank: int, waiting: _Waiting) -> str:
    store.set(str(rank), name)
    accepted = ""
    while True:
        part, present = json.loads(_read(store, "proposal") or '["", []]')
        if part != accepted and name in present:
            store.set(str(rank), f"{name} {part}")
            accepted = part
        if accepted and _read(store, "begin") == accepted:
            return accepted
        waiting.pause("rank 0, or a rank that it waits for")
