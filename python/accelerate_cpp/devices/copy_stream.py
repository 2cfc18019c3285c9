"""Copies to a GPU that continue beside the computing of the batch before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accelerate_cpp.devices.transfer import send_to_device
from accelerate_cpp.devices.tree import leaves_of


@dataclass(frozen=True)
class Copying:
    """A batch on its way: where it arrives, and what says when."""

    batch: Any
    arrived: Any


class CopyStream:
    """A CUDA stream of its own for the copies of one pass over a loader.

    Args:
        device: the GPU.
        cuda: ``torch.cuda``.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def begin(self, batch: Any) -> Copying:
        """Starts to copy ``batch``, whose tensors should be pinned: copies of others make the host wait."""
        with self._cuda.stream(self._stream):
            moved = send_to_device(batch, self._device, non_blocking=True)
            return Copying(moved, self._stream.record_event())

    def end(self, copying: Copying) -> Any:
        """The batch. What is computed from now on waits for the copy, the host does not."""
        current = self._cuda.current_stream(self._device)
        current.wait_event(copying.arrived)
        for leaf in leaves_of(copying.batch):
            if isinstance(leaf, torch.Tensor):
                # Its memory belongs to the stream of copies, which must not reuse it while it is computed with.
                leaf.record_stream(current)
        return copying.batch
