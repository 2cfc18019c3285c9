"""The part of a prepared loader that reports its position to the state of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.comm.gather import all_gather
from accelerate_cpp.comm.topology import world_size
from accelerate_cpp.data.adapter import DataLoaderAdapter
from accelerate_cpp.data.cursor import Pass, Start
from accelerate_cpp.data.uneven import while_all_have_some, while_any_has_some
from accelerate_cpp.devices.transfer import send_to_device
from accelerate_cpp.devices.tree import ignorant_find_batch_size
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.gradient_state import GradientState


class DataLoaderStateMixin:
    """What ``GradientState`` knows about a loader: whether its last batch has been returned, and its real samples.

    A loop over a prepared loader calls :meth:`begin` and :meth:`end`; call them yourself around batches that are read
    in another way. A custom class sets ``end_of_dataloader`` while its last batch is in use. ``completed`` are the
    samples of each process in the last batches, if those were completed and have no common size. ``weight`` is that of
    the batch in hand, where uneven batches are weighed.
    """

    end_of_dataloader = False
    remainder = -1
    repeated = False
    completed: Sequence[int] = ()
    weight: float | None = None

    @property
    def gradient_state(self) -> GradientState:
        """The position of the run between two optimizer steps."""
        return GradientState()

    def reset(self) -> None:
        """Resets the loader: ``end_of_dataloader`` is ``False``, and ``remainder`` is -1 (unknown)."""
        self.end_of_dataloader = self.repeated = False
        self.remainder = -1

    def begin(self) -> None:
        """The loader becomes the active one, with the ``remainder`` that follows from its length."""
        self.reset()
        self.remainder = self._expected_remainder()
        current.accumulation.reading.push_loader(self)

    def end(self) -> None:
        """Takes back the latest :meth:`begin`: the loader that was active before it is so again."""
        current.accumulation.reading.remove_loader(self)

    def _expected_remainder(self) -> int:
        return -1


class TrackedLoader(DataLoaderAdapter, DataLoaderStateMixin, ABC):
    """A loader that is the active one as long as an iterator over it exists."""

    def __iter__(self) -> Iterator[Any]:
        self._synchronize(self.progress.continues(self))
        self.begin()
        try:
            yield from self._pass()
        finally:
            self.end()

    def _pass(self) -> Iterator[Any]:
        state = current.accumulation.reading
        complete, reading = False, self.progress.begin(self)
        try:
            self.set_epoch(self.iteration)
            for batch, is_last, repeated in _agreed(self, self._batches(reading)):
                self.end_of_dataloader, self.repeated = is_last, repeated
                self.progress.advance(reading, is_last, repeated)
                self.weight = self._weight_of(batch) if state.weighs_rows else None
                yield batch
                self.progress.go_on(reading)
            # A pass of which everything was left out has been read to its end all the same.
            complete = self.end_of_dataloader or self.skipped_steps > 0 or reading.start != Start()
        finally:
            self.progress.end(reading, complete)

    def _weight_of(self, batch: Any) -> float:
        """The rows of a batch by those of a full one, so that losses stay about as large; 1 where there are no rows."""
        rows, total = ignorant_find_batch_size(batch), self.total_batch_size
        if rows is None:
            return 1.0
        return rows if total is None else rows * self.num_processes / total

    def _synchronize(self, continues: bool) -> None:
        """Makes ranks agree on what the pass depends on; if it ``continues`` a restored one, they did when it began."""

    @abstractmethod
    def _batches(self, reading: Pass) -> Iterator[tuple[Any, bool]]:
        """Yields this rank's batches and whether each is the last; sets ``remainder`` before the last."""


def _agreed(loader: TrackedLoader, batches: Iterator[tuple[Any, bool]]) -> Iterator[tuple[Any, bool, bool]]:
    """``batches``, and whether each is one that is repeated.

    Within ``join_uneven_inputs`` that stops or raises, those that all processes have; within one that repeats, as many
    as any process has.
    """
    reading = current.accumulation.reading
    if reading.repeats and world_size() > 1:
        for batch, is_last, repeated, first in while_any_has_some(batches, _who_has, partial(_first_of, loader)):
            reading.first_with_batch = first
            yield batch, is_last, repeated
        return
    if reading.on_uneven not in ("stop", "error") or world_size() == 1:
        for batch, is_last in batches:
            yield batch, is_last, False
        return
    for batch, is_last, cut in while_all_have_some(batches, _who_has, raises=reading.on_uneven == "error"):
        if cut:
            loader.remainder = 0  # nothing has been repeated yet to complete a last batch
        yield batch, is_last, False


def _first_of(loader: TrackedLoader, rank: int, batch: Any) -> Any:
    """The ``batch`` of ``rank`` on the device of the loader. Collective."""
    batches = [send_to_device(batch, "cpu")]
    dist.broadcast_object_list(batches, src=rank)
    return batches[0] if loader.device is None else send_to_device(batches[0], loader.device)


def _who_has(has: bool) -> list[bool]:
    """What each rank says, by rank. Collective."""
    assert current.session is not None
    (flags,) = all_gather([torch.tensor([int(has)], device=current.session.collective_device)], "gather")
    return [bool(flag) for flag in flags.tolist()]
