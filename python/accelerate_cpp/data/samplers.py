"""Samplers and dataset shards that give one process its part of the data."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate_cpp.data import sharding
from accelerate_cpp.data.skipping import Ranges, drawn_seed, keeping, permuted, random_indices

ALL: Ranges = ((0, None),)

_UNKNOWN = -1


class RepeatableRandomSampler(RandomSampler):
    """torch's random sampler, which remembers the seed that it drew for a pass and can reuse it.

    Without a generator, each pass is shuffled by a seed that is drawn from torch's global one, as torch does it.
    ``seed`` is that of the last pass, ``None`` before the first or with a generator. ``next_seed``, if not ``None``, is
    used by the next pass instead of drawing one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seed: int | None = None
        self.next_seed: int | None = None

    def __iter__(self) -> Iterator[int]:
        return self.keeping(ALL)

    def keeping(self, ranges: Ranges) -> Iterator[int]:
        """The indices at the positions in ``ranges``."""
        generator = self.generator
        if generator is None:
            self.seed, self.next_seed = drawn_seed() if self.next_seed is None else self.next_seed, None
            generator = torch.Generator()
            generator.manual_seed(self.seed)
        yield from random_indices(self, generator, ranges)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends on ``initial_seed + epoch`` alone, and is therefore the same on every rank.

    The order is that of torch's random sampler with a generator of this seed. ``epoch`` grows by one after each
    complete pass.

    Args:
        args, kwargs: those of ``torch.utils.data.RandomSampler``; a ``generator`` is seeded again for each pass.
        data_seed: the ``initial_seed``. Default: the seed of torch's generator when the sampler is created.
        computed: without replacement, an order other than torch's that is computed index by index: it takes no memory
            and can begin anywhere immediately, however many samples there are. A permutation takes 4 bytes for each
            sample, from 2 ** 31 samples on 8.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        self.computed: bool = kwargs.pop("computed", False)
        super().__init__(*args, **kwargs)
        self.has_own_seed = data_seed is not None
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return self.keeping(ALL)

    def keeping(self, ranges: Ranges) -> Iterator[int]:
        """The indices at the positions in ``ranges``."""
        seed = self.initial_seed + self.epoch
        if self.computed and not self.replacement:
            yield from permuted(len(self.data_source), seed, self.num_samples, ranges)
        else:
            if self.generator is None:
                self.generator = torch.Generator(device=torch.get_default_device())
            self.generator.manual_seed(seed)
            yield from random_indices(self, self.generator, ranges)
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next pass."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The batches of ``batch_sampler`` on which one process trains.

    By default, whole batches are distributed in turn. With ``split_batches`` every batch is cut into ``num_processes``
    slices; its ``batch_size`` must then be a multiple of ``num_processes`` (``InvalidArgument``). With ``even_batches``
    all processes get equally many batches of equal size: the last ones are completed with samples from the start.

    ``remainder`` is the number of real samples in the last global batch of the last complete pass, 0 if nothing was
    added to it, and ``None`` while a pass runs. ``completed`` are the samples of each process in the last round of
    batches, if that was completed.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.remainder: int | None = None
        self.completed: list[int] = []
        if split_batches:
            sharding.check_divisible(self.batch_size, num_processes)

    @property
    def total_length(self) -> int:
        """The number of batches that all processes together read."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return sharding.shard_length(
            len(self.batch_sampler),
            rank=self.process_index,
            world_size=self.num_processes,
            split=self.split_batches,
            drop_last=self.drop_last,
            even=self.even_batches,
        )

    def __iter__(self) -> Iterator[list[int]]:
        return self._after(0)

    def keeping(self, ranges: Ranges) -> Iterator[list[int]]:
        """The batches at the position in ``ranges``, which is one range to the end."""
        ((start, stop),) = ranges
        assert stop is None, "only what follows a position can be taken from a shard"
        return self._after(start)

    def _after(self, skipped: int) -> Iterator[list[int]]:
        """This process's batches after the first ``skipped``.

        The first round is read even then, because a last one is completed from it. Only for torch's own batch sampler
        is it known that each round except the last gives this process a batch.
        """
        self.remainder, self.completed = None, []
        dealing = partial(sharding.deal_batches, completed=self.completed)
        deal = sharding.slice_batches if self.split_batches else dealing
        round_size = 1 if self.split_batches else self.num_processes
        jumps = skipped > 0 and type(self.batch_sampler) is BatchSampler
        ranges: Ranges = ((0, round_size), (skipped * round_size, None)) if jumps else ALL
        dealt = deal(
            keeping(self.batch_sampler, ranges),
            rank=self.process_index,
            world_size=self.num_processes,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            even=self.even_batches,
        )
        for _ in range(1 if jumps else skipped):
            next(dealt, None)
        self.remainder = yield from dealt  # type: ignore[misc]


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of an iterable dataset on which one process trains; every process reads all of them.

    Blocks of ``batch_size * num_processes`` samples (``batch_size`` with ``split_batches``) are cut into equal slices.
    A short last block is completed from the first one unless ``drop_last``. ``remainder`` is as in
    :class:`BatchSamplerShard`.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            sharding.check_divisible(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.epoch = 0
        self._remainder = torch.tensor(_UNKNOWN)

    @property
    def remainder(self) -> int | None:
        """See :class:`BatchSamplerShard`."""
        counted = int(self._remainder)
        return None if counted == _UNKNOWN else counted

    @remainder.setter
    def remainder(self, remainder: int | None) -> None:
        self._remainder.fill_(_UNKNOWN if remainder is None else remainder)

    def share_remainder(self) -> None:
        """Makes the copy of this dataset in a worker process report ``remainder`` here."""
        self._remainder.share_memory_()

    @property
    def total_batch_size(self) -> int:
        """The number of samples in one block, which all processes together read per step."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    @property
    def total_length(self) -> int:
        """Samples of the whole dataset; ``TypeError`` if it has no length."""
        return len(cast(Sized, self.dataset))

    def set_epoch(self, epoch: int) -> None:
        """Tells the dataset the next epoch; if it only has a ``generator``, that is seeded with ``epoch``."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return sharding.samples_per_rank(
            self.total_length,
            world_size=self.num_processes,
            global_batch=self.total_batch_size,
            drop_last=self.drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        self.remainder = None
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        self.remainder = yield from sharding.deal_samples(
            self.dataset,
            rank=self.process_index,
            world_size=self.num_processes,
            global_batch=self.total_batch_size,
            drop_last=self.drop_last,
        )


class SkipBatchSampler(BatchSampler):
    """The batches of ``batch_sampler`` after the first ``skip_batches``; their samples are never read."""

    def __init__(self, batch_sampler: BatchSampler, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @property
    def total_length(self) -> int:
        """The number of batches including the skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        return self.keeping(ALL)

    def keeping(self, ranges: Ranges) -> Iterator[list[int]]:
        """The batches at the positions in ``ranges``, counted without the skipped ones."""
        skipped = self.skip_batches
        return keeping(
            self.batch_sampler, [(start + skipped, None if stop is None else stop + skipped) for start, stop in ranges]
        )


class RedrawnSampler(BatchSampler):
    """The items of ``batch_sampler``, which begins with torch's global generator in ``state``.

    What it draws before its first item is drawn from there, and the generator keeps the state that it has.
    """

    def __init__(self, batch_sampler: Any, state: torch.Tensor) -> None:
        self.batch_sampler = batch_sampler
        self.state = state
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        kept = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            items = iter(self.batch_sampler)
            first = list(islice(items, 1))
        finally:
            torch.set_rng_state(kept)
        yield from chain(first, items)
