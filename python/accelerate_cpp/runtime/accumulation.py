"""Gradient accumulation: where a run stands between two optimizer steps, and which loader it is reading."""

from __future__ import annotations

import weakref
from typing import Any


class Accumulation:
    """Decides for each micro-batch whether gradients are synchronised and the optimizer steps.

    ``step`` counts micro-batches since the last forced synchronisation. Loaders push themselves when an iterator over
    them starts and remove themselves when it ends; the innermost one decides ``end_of_dataloader`` and ``remainder``.
    Loaders are held weakly, so an abandoned iterator leaves nothing behind.
    """

    def __init__(
        self,
        num_steps: int = 1,
        adjust_scheduler: bool = False,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
    ) -> None:
        self.num_steps = num_steps
        self.adjust_scheduler = adjust_scheduler
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.step = 0
        self.sync_gradients = True
        self._loaders: list[weakref.ref[Any]] = []

    @property
    def active_loader(self) -> Any | None:
        """The prepared loader whose iterator started last and has not ended, or ``None``."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            self._loaders.pop()
        return None

    def push_loader(self, loader: Any) -> None:
        """An iterator over ``loader`` has started."""
        self._loaders.append(weakref.ref(loader))

    def remove_loader(self, loader: Any) -> None:
        """The innermost iterator over ``loader`` has ended, whether by exhaustion, ``break`` or an exception."""
        for index in reversed(range(len(self._loaders))):
            if self._loaders[index]() is loader:
                del self._loaders[index]
                return

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in hand is the active loader's last."""
        loader = self.active_loader
        return loader is not None and bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Real samples in the last global batch of the active loader; 0 when it is full, -1 when unknown."""
        loader = self.active_loader
        return -1 if loader is None else int(loader.remainder)

    def advance(self) -> bool:
        """Counts one micro-batch and returns whether gradients are synchronised in it."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0
        return self.sync_gradients
