"""The memory file for the progress of workers: each writes its own slot, and the launcher reads them.

A slot is a header (steps, loss, resident bytes, device bytes, when the worker began, the pass over a loader: batches
read, all batches, nanoseconds left; the process) and a ring with the last steps: when each ended, and how long the
worker had waited for other ranks until then, in nanoseconds. ``steps`` is written last, so a step that it counts is in
the ring. Times are of the monotonic clock, which all processes of a host share.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from accelerate_cpp.comm.memory_file import memory_file
from accelerate_cpp.config import env_table

_NAME = "accelerate-cpp-board"
_HEADER = struct.Struct("=QdQQqQQqq")
_STEPS = struct.Struct("=Q")
_LOSS = struct.Struct("=d")
_MEMORY = struct.Struct("=QQ")
_BEGAN = struct.Struct("=q")
_PASS = struct.Struct("=QQq")
_PID = struct.Struct("=q")
_ENTRY = struct.Struct("=qq")
_LOSS_OFFSET, _MEMORY_OFFSET, _BEGAN_OFFSET, _PASS_OFFSET, _PID_OFFSET, _RING_OFFSET = 8, 16, 32, 40, 64, 72
WINDOW_STEPS = 10
_RING_STEPS = 16  # more than are read, so that a worker may continue meanwhile
_SLOT_BYTES = _RING_OFFSET + _RING_STEPS * _ENTRY.size
_ATTEMPTS = 10


@dataclass(frozen=True)
class Standing:
    """The progress of one worker.

    Attributes:
        steps: the number of its optimizer steps.
        loss: of the last step, on an accelerator of a recent one until the program ends; NaN if unknown.
        resident_bytes: of its memory on the host.
        device_bytes: of its tensors on its accelerator; 0 without one.
        last_ns: when its last step ended, or it began; 0 before.
        step_seconds: of its last steps, the oldest first.
        waited_seconds: how long it waited for other ranks in each of these.
        has_waited: whether it ever did.
        batches_read: of the pass over the loader that is trained on.
        batches: of the whole pass; 0 if that is unknown.
        seconds_left: until the end of the pass, at its rate so far; ``None`` if that is unknown.
        pid: the process; 0 before it began.
        cause: why it is slower than the others, where somebody has found out.
    """

    rank: int
    steps: int = 0
    loss: float = math.nan
    resident_bytes: int = 0
    device_bytes: int = 0
    last_ns: int = 0
    step_seconds: Sequence[float] = ()
    waited_seconds: Sequence[float] = ()
    has_waited: bool = False
    batches_read: int = 0
    batches: int = 0
    seconds_left: float | None = None
    pid: int = 0
    cause: str = ""

    @property
    def own_seconds(self) -> list[float]:
        """The time of each of its last steps without waiting."""
        return [max(0.0, step - wait) for step, wait in zip(self.step_seconds, self.waited_seconds, strict=True)]

    @property
    def steps_per_second(self) -> float:
        """The rate of its last steps; 0 before the first."""
        taken = sum(self.step_seconds)
        return len(self.step_seconds) / taken if taken > 0 else 0.0

    @property
    def share_waited(self) -> float:
        """The part of its last steps in which it waited, from 0 to 1."""
        taken = sum(self.step_seconds)
        return min(1.0, sum(self.waited_seconds) / taken) if taken > 0 else 0.0


class Slot:
    """A worker's side: what it writes is seen at once."""

    def __init__(self, memory: mmap.mmap, number: int, began_ns: int) -> None:
        self._memory = memory
        self._start = number * _SLOT_BYTES
        (self._steps,) = _STEPS.unpack_from(memory, self._start)
        _PID.pack_into(memory, self._start + _PID_OFFSET, os.getpid())
        if self._steps == 0:
            _BEGAN.pack_into(memory, self._start + _BEGAN_OFFSET, began_ns)
            self.set_loss(math.nan)

    def add_step(self, ended_ns: int, waited_ns: int) -> None:
        """One more step has ended; ``waited_ns`` is the time waited since the worker began."""
        start = self._start
        entry = start + _RING_OFFSET + self._steps % _RING_STEPS * _ENTRY.size
        _ENTRY.pack_into(self._memory, entry, ended_ns, waited_ns)
        self._steps += 1
        _STEPS.pack_into(self._memory, start, self._steps)

    def set_loss(self, loss: float) -> None:
        """The loss of the step that ends next, or ended last."""
        _LOSS.pack_into(self._memory, self._start + _LOSS_OFFSET, loss)

    def set_memory(self, resident_bytes: int, device_bytes: int) -> None:
        """How much the process uses."""
        _MEMORY.pack_into(self._memory, self._start + _MEMORY_OFFSET, resident_bytes, device_bytes)

    def set_pass(self, batches_read: int, batches: int, left_ns: int) -> None:
        """The position in the pass that is trained on, of ``batches`` or 0, and its time left; negative if unknown."""
        _PASS.pack_into(self._memory, self._start + _PASS_OFFSET, batches_read, batches, left_ns)


def open_slot(place: tuple[int, int], began_ns: int) -> Slot | None:
    """The slot at ``place``, a descriptor and a number; ``None`` where the descriptor is no board.

    A program that a worker starts may have inherited the variable without the descriptor.
    """
    descriptor, number = place
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{_NAME}"):
            return None
        return Slot(mmap.mmap(descriptor, 0), number, began_ns)
    except OSError:
        return None


class Board:
    """The launcher's side.

    Attributes:
        descriptor: for the workers to inherit.
        ranks: of the workers, in the order of their slots.
    """

    def __init__(self, descriptor: int, ranks: Sequence[int]) -> None:
        self.descriptor = descriptor
        self.ranks = ranks
        os.ftruncate(descriptor, len(ranks) * _SLOT_BYTES)
        self._memory = mmap.mmap(descriptor, 0)

    def variables(self, number: int) -> dict[str, str]:
        """The value that tells the worker with this ``number`` its slot."""
        return env_table.render({env_table.BOARD: (self.descriptor, number)})

    def look(self) -> list[Standing]:
        """The progress of each worker."""
        return [self._read(number, rank) for number, rank in enumerate(self.ranks)]

    def close(self) -> None:
        """Releases the memory."""
        self._memory.close()

    def _read(self, number: int, rank: int) -> Standing:
        start = number * _SLOT_BYTES
        for _ in range(_ATTEMPTS):
            slot = bytes(self._memory[start : start + _SLOT_BYTES])
            steps, loss, resident, device, began, read, batches, left, pid = _HEADER.unpack_from(slot)
            (steps_after,) = _STEPS.unpack_from(self._memory, start)
            if steps_after - steps < _RING_STEPS - WINDOW_STEPS - 1:  # what is read has not been overwritten
                break
        first = max(0, steps - WINDOW_STEPS - 1)
        entries = [
            _ENTRY.unpack_from(slot, _RING_OFFSET + step % _RING_STEPS * _ENTRY.size) for step in range(first, steps)
        ]
        pairs = list(pairwise(entries))
        return Standing(
            rank=rank,
            steps=steps,
            loss=loss if steps else math.nan,
            resident_bytes=resident,
            device_bytes=device,
            last_ns=entries[-1][0] if entries else began,
            step_seconds=[(after[0] - before[0]) / 1e9 for before, after in pairs],
            waited_seconds=[(after[1] - before[1]) / 1e9 for before, after in pairs],
            has_waited=bool(entries) and entries[-1][1] > 0,
            batches_read=read,
            batches=batches,
            seconds_left=left / 1e9 if batches and left >= 0 else None,
            pid=pid,
        )


@contextmanager
def board(ranks: Sequence[int]) -> Iterator[Board]:
    """An empty board for workers with ``ranks``."""
    descriptor = memory_file(_NAME)
    try:
        made = Board(descriptor, ranks)
        try:
            yield made
        finally:
            made.close()
    finally:
        os.close(descriptor)
