"""What a worker tells the launcher, which shows the progress: steps, loss, memory, and time spent waiting."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate_cpp._native import time_waited
from accelerate_cpp.config import env_table
from accelerate_cpp.data.cursor import Pass, Progress
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.runtime.progress_board import Slot, open_slot
from accelerate_cpp.runtime.reading import Reading

_STATE_INTERVAL_NS = 500_000_000


class ProgressReporter:
    """Writes into a slot of the board at each step; memory at most twice a second.

    So is a loss on an accelerator, because reading it waits for everything that is queued there; the last one is read
    when the program ends.
    """

    def __init__(self, slot: Slot, device: torch.device) -> None:
        self._slot = slot
        self._device = device
        self._reads_each_loss = device.type == "cpu"
        self._state_due_ns = 0
        self._seen: tuple[torch.Tensor, float | torch.Tensor | None] | None = None
        self._pass: _Pass | None = None

    def saw_loss(self, loss: object, weight: float | torch.Tensor | None = None) -> None:
        """A backward pass begins from ``loss``, which is a sum if there is a weight; its mean is shown."""
        if type(loss) is torch.Tensor and loss.numel() == 1 and loss.is_floating_point():
            self._seen = (loss.detach(), weight)

    def step_ended(self, reading: Reading) -> None:
        """The optimizer has stepped, while ``reading`` had a loader in hand or none."""
        now_ns, waited_ns = time.monotonic_ns(), int(time_waited().total_seconds() * 1e9)
        is_due = now_ns >= self._state_due_ns
        if is_due:
            self._state_due_ns = now_ns + _STATE_INTERVAL_NS
            self._slot.set_memory(_resident_bytes(), _device_bytes(self._device))
        if is_due or self._reads_each_loss:
            self._tell_loss()
        self._tell_pass(reading.active_loader, now_ns)
        self._slot.add_step(now_ns, waited_ns)

    def end(self) -> None:
        """The program ends: what is known of the last step is told."""
        self._tell_loss()

    def _tell_loss(self) -> None:
        if self._seen is not None:
            (loss, weight), self._seen = self._seen, None
            divisor = 1.0 if weight is None else float(weight)
            self._slot.set_loss(float(loss) / divisor if divisor else math.nan)

    def _tell_pass(self, loader: Any, now_ns: int) -> None:
        cursor = getattr(loader, "progress", None)
        if not isinstance(cursor, Progress):  # none is read, or a loader of the program's own
            return
        if self._pass is None or self._pass.latest is not cursor.latest:
            try:
                batches = len(loader) + loader.skipped_steps
            except TypeError:  # a stream
                batches = 0
            self._pass = _Pass(cursor.latest, batches, cursor.steps, now_ns)
        self._slot.set_pass(cursor.steps, self._pass.batches, self._pass.left_ns(cursor.steps, now_ns))


@dataclass(frozen=True)
class _Pass:
    """The pass over a loader, of so many batches (0: unknown), and where and when its first step ended."""

    latest: Pass | None
    batches: int
    first_read: int
    first_ns: int

    def left_ns(self, read: int, now_ns: int) -> int:
        """The time left at the rate so far; -1 if that is unknown."""
        if read == self.first_read or not self.batches:
            return -1
        return (now_ns - self.first_ns) * max(0, self.batches - read) // (read - self.first_read)


def open_progress(device: torch.device) -> ProgressReporter | None:
    """The progress of this process if a launcher has asked for it."""
    place = env_table.BOARD.get()
    slot = None if place is None else open_slot(place, time.monotonic_ns())
    return None if slot is None else ProgressReporter(slot, device)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _device_bytes(device: torch.device) -> int:
    kind = kind_of(device)
    return 0 if kind.shares_memory_with_host else kind.allocated_bytes(device.index)
