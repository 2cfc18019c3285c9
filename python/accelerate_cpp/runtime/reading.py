"""Which prepared loaders a process is reading, and what it does when some processes have no batches any more."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Literal

OnUneven = Literal["join", "stop", "error"]


class Reading:
    """The loaders that are being read; the innermost one decides ``end_of_dataloader`` and ``remainder``.

    Loaders push themselves when an iterator over them starts and remove themselves when it ends. They are held weakly,
    so an abandoned iterator leaves nothing behind.

    ``has_begun`` is whether any prepared loader has been read yet. ``on_uneven`` says what loaders do when some
    processes have no batches any more (``None``: nothing, and collectives that do not fit together raise). With
    ``weighs_rows``, loaders tell the weight of a batch. With ``repeats``, loaders of processes without batches go on
    with the last one, micro-batches without a weight have the one that the active loader tells, and
    ``first_with_batch`` is the first rank that has a batch of its own. ``share`` is by what a mean loss is multiplied,
    so that the mean over the processes that train is the one over their samples; ``None`` if they all count the same.
    """

    def __init__(self) -> None:
        self._loaders: list[weakref.ref[Any]] = []
        self.has_begun = False
        self.on_uneven: OnUneven | None = None
        self.weighs_rows = self.repeats = False
        self.first_with_batch = 0
        self.share: float | None = None

    @property
    def weight(self) -> float | None:
        """The rows of the batch in hand of the active loader, by those of a full one; ``None`` if it does not tell."""
        weight: float | None = getattr(self.active_loader, "weight", None)
        return weight

    @property
    def active_loader(self) -> Any | None:
        """The prepared loader whose iterator started last and has not ended, or ``None``."""
        while self._loaders:
            loader = self._loaders[-1]()
            if loader is not None:
                return loader
            self._loaders.pop()
        return None

    @property
    def loaders(self) -> list[Any]:
        """The loaders that are being read, the outermost first; set it to say which ones are."""
        return [loader for reference in self._loaders if (loader := reference()) is not None]

    @loaders.setter
    def loaders(self, loaders: Iterable[Any]) -> None:
        self._loaders = [weakref.ref(loader) for loader in loaders]

    def push_loader(self, loader: Any) -> None:
        """An iterator over ``loader`` has started."""
        self.has_begun = True
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
    def repeated(self) -> bool:
        """Whether a batch in hand is one that its loader only repeats."""
        return any(getattr(loader, "repeated", False) for loader in self.loaders)

    @property
    def remainder(self) -> int:
        """Real samples in the last global batch of the active loader; 0 when it is full, -1 when unknown."""
        loader = self.active_loader
        return -1 if loader is None else int(loader.remainder)
