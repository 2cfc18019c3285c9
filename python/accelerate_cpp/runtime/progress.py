"""What a worker tells the launcher, which shows the progress: steps, loss, memory, and time spent waiting."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import torch

from accelerate_cpp._native import time_waited
from accelerate_cpp.config import env_table
from accelerate_cpp.runtime.progress_board import Slot, open_slot

_STATE_INTERVAL_NS = 500_000_000


class ProgressReporter:
    """Writes into a slot of the board at each step; loss and memory at most twice a second.

    One loss is kept in each interval: reading one from an accelerator waits for everything that is queued there.
    """

    def __init__(self, slot: Slot, device: torch.device) -> None:
        self._slot = slot
        self._device = device
        self._state_due_ns = 0
        self._wants_loss = True
        self._seen: tuple[torch.Tensor, float | torch.Tensor | None] | None = None
        self._loss = math.nan

    def saw_loss(self, loss: object, weight: float | torch.Tensor | None = None) -> None:
        """A backward pass begins from ``loss``, which is a sum if there is a weight; its mean is shown."""
        if self._wants_loss and type(loss) is torch.Tensor and loss.numel() == 1 and loss.is_floating_point():
            self._seen = (loss.detach(), weight)
            self._wants_loss = False

    def step_ended(self) -> None:
        """The optimizer has stepped."""
        now_ns, waited_ns = time.monotonic_ns(), int(time_waited().total_seconds() * 1e9)
        if now_ns >= self._state_due_ns:
            self._state_due_ns = now_ns + _STATE_INTERVAL_NS
            self._read_loss()
            self._slot.set_state(self._loss, _resident_bytes(), _device_bytes(self._device))
        self._slot.add_step(now_ns, waited_ns)

    def _read_loss(self) -> None:
        self._wants_loss = True
        if self._seen is not None:
            (loss, weight), self._seen = self._seen, None
            divisor = 1.0 if weight is None else float(weight)
            self._loss = float(loss) / divisor if divisor else math.nan


def open_progress(device: torch.device) -> ProgressReporter | None:
    """The progress of this process if a launcher has asked for it."""
    place = env_table.BOARD.get()
    slot = None if place is None else open_slot(place, time.monotonic_ns())
    return None if slot is None else ProgressReporter(slot, device)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _device_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
