"""Gradient accumulation: where a run stands between two optimizer steps, and which loader it is reading."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

from accelerate_cpp.errors import InvalidArgument

OnUneven = Literal["join", "stop", "error"]


class Accumulation:
    """Decides for each micro-batch whether gradients are synchronised and the optimizer steps.

    ``step`` counts micro-batches since the last forced synchronisation. Loaders push themselves when an iterator over
    them starts and remove themselves when it ends; the innermost one decides ``end_of_dataloader`` and ``remainder``.
    Loaders are held weakly, so an abandoned iterator leaves nothing behind.

    ``on_uneven`` says what loaders do when some processes have no batches any more (``None``: nothing, and collectives
    that do not fit together raise). With ``weighs_rows``, a micro-batch without a weight weighs its ``rows``, which the
    active loader tells.
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
        self.on_uneven: OnUneven | None = None
        self.weighs_rows = False
        self.rows: int | None = None
        self._weights: list[float | None] = []
        self._averaged_by_weight = False

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

    def weigh(self, weight: float | None, cleared: Callable[[], bool]) -> float | None:
        """Takes the weight of one backward pass.

        Args:
            weight: ``None`` for a loss that is a mean.
            cleared: whether no gradient is left of the last step.

        Returns:
            What the gradients of the step weigh, if this pass completes it and has a weight.

        Raises:
            InvalidArgument: some passes of the step have a weight and some have none; or the gradients of this step
                have been divided by their weights already.
        """
        if self._averaged_by_weight and not cleared():
            raise InvalidArgument(
                "a second backward pass after gradients were divided by their weights, which could not be added to "
                "them; step and zero the gradients first, or put all passes of a step into accumulate()"
            )
        self._averaged_by_weight = False
        if weight is not None and not 0.0 <= weight < math.inf:
            raise InvalidArgument(f"weight={weight}: expected a finite number that is not negative")
        if self._weights and (self._weights[0] is None) != (weight is None):
            self._weights.clear()
            raise InvalidArgument(
                "some backward passes of this step have a weight and some have none; pass backward(loss, weight=...) "
                "in all of them, or in none"
            )
        self._weights.append(weight)
        if not self.sync_gradients:
            return None
        weights, self._weights = self._weights, []
        self._averaged_by_weight = weight is not None
        return sum(one for one in weights if one is not None) if weight is not None else None

    def end_step(self) -> None:
        """The optimizer has stepped, or gradients were cleared."""
        self._averaged_by_weight = False

    def advance(self) -> bool:
        """Counts one micro-batch and returns whether gradients are synchronised in it."""
        if self.sync_with_dataloader and self.end_of_dataloader:
            self.step = 0
            self.sync_gradients = True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.num_steps == 0
        return self.sync_gradients
