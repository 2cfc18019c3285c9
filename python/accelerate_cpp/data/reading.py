"""Reading a prepared loader from the start of a pass, without reading anything before it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset

from accelerate_cpp.data import loaders, stateful
from accelerate_cpp.data.cursor import Pass, Start, read_in
from accelerate_cpp.data.lost_workers import Read
from accelerate_cpp.data.samplers import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler
from accelerate_cpp.data.skipping import keeping
from accelerate_cpp.errors import InvalidArgument


def opened(loader: Any, reading: Pass) -> tuple[Any, Any]:
    """Starts to read prepared ``loader`` at the start of pass ``reading``.

    Returns:
        The loader that is read, which is another one if the sampler skips what precedes the start, and an iterator over
        its batches.
    """
    left_out, start = read_in(loader, loader.skip_batches), reading.start
    source = loader.base_dataloader
    if stateful.is_torchdata(source) and not start.restored and source.next_iter_state is not None:
        stateful.forget(source)
    if start.restored:
        pass
    elif isinstance(loader.dataset, IterableDataset):
        left_out += read_in(loader, start.steps) + start.batches
        if start.samples:
            rest = _rest_of_stream(loader.dataset, start.samples)
            source = stateful.like(source, rest, **loaders.batching_of(loader), **loaders.options_of(loader))
    elif start != Start():
        source = stateful.like(source, loader.dataset, **_rest_of(loader, start), **loaders.options_of(loader))
    if reading.drawn_from is not None and not start.restored:
        drawn = loaders.drawing_from(source, reading.drawn_from)
        source = stateful.like(source, loader.dataset, **drawn, **loaders.options_of(loader))
    drawn_before = reading.keeps_seed or (reading.resumes and source.generator is None)
    kept = torch.get_rng_state() if start.restored else None
    batches = _with_seed_of_its_own(source) if drawn_before else iter(source)
    if kept is not None:  # torchdata may have read what precedes the start
        torch.set_rng_state(kept)
    iterator = batches
    if stateful.is_torchdata(source) and start.is_whole:
        batches = reading.recorded = _recorded(loader, batches, start)
    batches = Read(batches, iterator)
    if source.num_workers > 0:
        return source, islice(batches, left_out, None)
    return source, _read_here(batches, left_out, reading)


def _read_here(batches: Iterator[Any], left_out: int, reading: Pass) -> Iterator[Any]:
    """``batches`` after the first ones, which this process reads, and perhaps collates at random: steps that were read
    ahead before a checkpoint was written draw the same after it, and only once."""
    kept = torch.get_rng_state()
    _drop(batches, left_out)
    if reading.resumes:
        torch.set_rng_state(kept)
    for state in reading.first_read_from:
        kept = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            step = list(islice(batches, reading.read_per_step))
        finally:
            torch.set_rng_state(kept)
        reading.read_from.append(state)
        yield from step
    while True:
        state = torch.get_rng_state()
        step = list(islice(batches, reading.read_per_step))
        if not step:
            return
        reading.read_from.append(state)
        yield from step


def _drop(items: Iterator[Any], count: int) -> None:
    deque(islice(items, count), maxlen=0)


def _recorded(loader: Any, batches: Any, start: Start) -> stateful.Recorded:
    """``batches`` of torchdata's loader, which does not know about those that a sampler skips."""
    if isinstance(loader.dataset, IterableDataset):
        return stateful.Recorded(batches, read_in(loader, start.steps) if start.restored else 0, 0)
    taken = read_in(loader, loader.skipped_steps + start.steps)
    return stateful.Recorded(batches, taken, 0 if start.restored else taken)


def _with_seed_of_its_own(source: Any) -> Any:
    """An iterator over torch's loader ``source`` that takes no seed for its workers from a generator of the program.

    When the pass began that is gone on with, one was drawn; or none, as workers persisted.
    """
    kept, source.generator = source.generator, torch.Generator()
    source.generator.set_state(torch.get_rng_state())
    try:
        return iter(source)
    finally:
        source.generator = kept


def _rest_of(loader: Any, start: Start) -> dict[str, Any]:
    """The arguments of torch's ``DataLoader`` for what follows ``start`` in ``loader``, which is map-style."""
    shard = loaders.shard_of(loader)
    if start.is_whole:
        return loaders.skipping(loader, read_in(loader, start.steps))
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    inner = getattr(loader, name) if shard is None else shard.batch_sampler  # type: ignore[union-attr]
    rest: Any = SkipBatchSampler(inner, start.batches)
    if start.samples and type(inner) is not BatchSampler:
        raise InvalidArgument(
            f"the cursor is at sample {start.samples}, inside a batch of this loader's {type(inner).__name__}: only "
            "torch's BatchSampler can start there; choose a batch size that divides it"
        )
    if start.samples:
        rest = BatchSampler(_Later(inner.sampler, start.samples), inner.batch_size, inner.drop_last)
    if isinstance(shard, BatchSamplerShard):
        rest = BatchSamplerShard(
            rest, shard.num_processes, shard.process_index, shard.split_batches, shard.even_batches
        )
    return {name: rest} if name == "batch_sampler" else {"sampler": rest, "batch_size": None}


class _LaterSamples(IterableDataset[Any]):
    """The samples of an iterable dataset after its first ones, which are read and dropped."""

    def __init__(self, dataset: Any, skipped: int) -> None:
        self.dataset = dataset
        self.skipped = skipped

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return max(0, len(self.dataset) - self.skipped)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.skipped, None)


def _rest_of_stream(dataset: Any, skipped: int) -> Any:
    if not isinstance(dataset, IterableDatasetShard):
        return _LaterSamples(dataset, skipped)
    rest = copy.copy(dataset)
    rest.dataset = _LaterSamples(dataset.dataset, skipped)
    return rest


class _Later:
    """The indices of a sampler after its first ones."""

    def __init__(self, indices: Any, skipped: int) -> None:
        self.indices = indices
        self.skipped = skipped

    def __len__(self) -> int:
        return max(0, len(self.indices) - self.skipped)

    def __iter__(self) -> Iterator[int]:
        return keeping(self.indices, [(self.skipped, None)])
