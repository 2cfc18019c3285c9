"""The parts of a torch ``DataLoader``, and how they are sharded and rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate_cpp.data import sharding
from accelerate_cpp.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    RedrawnSampler,
    RepeatableRandomSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate_cpp.errors import InvalidArgument

# Arguments that a rebuilt loader takes over unchanged. Batch size, sampler and drop_last depend on the sharding.
_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def options_of(loader: Any) -> dict[str, Any]:
    """The arguments of torch's ``DataLoader`` that do not choose samples; ``in_order`` only if torch has it."""
    return {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}


def _chain(sampler: Any) -> Iterator[Any]:
    while sampler is not None:
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def samplers_of(loader: Any) -> list[Any]:
    """The batch sampler of ``loader`` and all samplers that it wraps, outermost first, down to the index sampler."""
    return list(_chain(loader.sampler if loader.batch_sampler is None else loader.batch_sampler))


def get_sampler(dataloader: Any) -> Any:
    """The sampler of single indices behind ``dataloader``; ``None`` if its batch sampler has none."""
    innermost = samplers_of(dataloader)[-1]
    return None if innermost is dataloader.batch_sampler or isinstance(innermost, BatchSampler) else innermost


def replace_sampler(loader: Any, sampler: Any) -> None:
    """Replaces the sampler of single indices with ``sampler``; ``InvalidArgument`` if there is none."""
    samplers = samplers_of(loader)
    if len(samplers) < 2:
        raise InvalidArgument(
            f"the loader's {type(samplers[0]).__name__} does not use an index sampler that could be replaced"
        )
    samplers[-2].sampler = sampler


def shard_of(loader: Any) -> BatchSamplerShard | IterableDatasetShard | None:
    """The object that selects this process's part of the data of ``loader``; ``None`` if it reads everything."""
    if isinstance(loader.dataset, IterableDatasetShard):
        return loader.dataset
    return next((sampler for sampler in samplers_of(loader) if isinstance(sampler, BatchSamplerShard)), None)


def expected_remainder(loader: Any, global_batch: int | None) -> int:
    """Real samples in the last global batch of ``global_batch`` as far as lengths tell; 0 if full, -1 if unknown."""
    samplers, dataset = samplers_of(loader), loader.dataset
    if global_batch is None:
        return -1
    try:
        if isinstance(dataset, IterableDatasetShard):
            # Several workers are several copies of the dataset, and each copy completes a last batch of its own.
            return dataset.total_length % global_batch if loader.num_workers < 2 else -1
        if isinstance(dataset, IterableDataset) or len(samplers) < 2 or type(samplers[-2]) is not BatchSampler:
            return -1
        return len(samplers[-1]) % global_batch
    except (TypeError, NotImplementedError):
        return -1


def check_split(loader: Any, num_processes: int, dispatched: bool) -> None:
    """Raises ``InvalidArgument`` unless the batches of ``loader`` can be cut into ``num_processes`` equal parts.

    A dispatched loader with ``batch_size=1`` passes: its samples may be whole batches, which are checked when they are
    read.
    """
    size = loader.batch_size
    if size is None:
        size = getattr(samplers_of(loader)[0], "batch_size", None)
    if not (dispatched and size == 1):
        sharding.check_divisible(size, num_processes)


def use_seedable_sampler(loader: Any, data_seed: int | None, order: bool | str = True) -> bool:
    """Replaces a random sampler of ``loader`` with one ordered by seed and epoch; returns whether there was one.

    Args:
        order: ``True`` for torch's, or ``"computed"``: see :class:`SeedableRandomSampler`. ``InvalidArgument`` for
            another string.
    """
    if isinstance(order, str) and order != "computed":
        raise InvalidArgument(
            f"use_seedable_sampler={order!r}: expected True, for torch's order, False, or 'computed', for an order "
            "that takes no memory"
        )
    sampler = get_sampler(loader)
    if not isinstance(sampler, RandomSampler) or len(samplers_of(loader)) < 2:
        return False
    seedable = SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
        computed=order == "computed" or getattr(sampler, "computed", False),
    )
    replace_sampler(loader, seedable)
    return True


def use_repeatable_sampler(loader: Any) -> None:
    """Replaces torch's random sampler without generator with one that draws the same and remembers its seed.

    In a loader without batches, it cannot be replaced.
    """
    sampler = get_sampler(loader)
    if type(sampler) is RandomSampler and sampler.generator is None and len(samplers_of(loader)) > 1:
        replace_sampler(loader, RepeatableRandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples))


def shared_generator(loader: Any) -> torch.Generator | None:
    """The generator that orders the samples of ``loader``, which processes must agree on; ``None`` without one.

    That of an iterable dataset or of the sampler; a sampler whose generator is ``None`` gets one with a random seed.
    """
    if isinstance(loader.dataset, IterableDataset):
        return getattr(loader.dataset, "generator", None)
    sampler = get_sampler(loader)
    if not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    generator: torch.Generator = sampler.generator
    return generator


def batching_of(loader: Any) -> dict[str, Any]:
    """The arguments of torch's ``DataLoader`` that give the batches of ``loader``."""
    if isinstance(loader.dataset, IterableDataset):
        return {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is None:
        return {"sampler": loader.sampler, "batch_size": None}
    return {"batch_sampler": loader.batch_sampler}


def part_of(
    loader: Any, num_processes: int, process_index: int, split_batches: bool, even_batches: bool
) -> dict[str, Any]:
    """The arguments of torch's ``DataLoader`` that give one process's part of ``loader``, ``dataset`` among them.

    Raises ``InvalidArgument`` for a loader without batches (``batch_size=None``), which several processes cannot share.
    """
    dataset, batching = loader.dataset, batching_of(loader)
    if num_processes == 1:
        return {"dataset": dataset, **batching}
    if isinstance(dataset, IterableDataset):
        if batching["batch_size"] is not None and split_batches:
            batching["batch_size"] //= num_processes
        return {"dataset": _shard_iterable(loader, num_processes, process_index, split_batches), **batching}
    name, batch_sampler = next((name, batching[name]) for name in ("batch_sampler", "sampler") if name in batching)
    if name == "sampler" and not isinstance(batch_sampler, BatchSampler):
        raise InvalidArgument(
            f"a DataLoader with batch_size=None gives single samples, which cannot be divided among "
            f"{num_processes} processes: give it a batch_size or a batch sampler"
        )
    shard = BatchSamplerShard(batch_sampler, num_processes, process_index, split_batches, even_batches)
    return {"dataset": dataset, **batching, name: shard}


def _shard_iterable(loader: Any, num_processes: int, process_index: int, split_batches: bool) -> IterableDataset[Any]:
    """This process's part of an iterable dataset.

    One of at least ``num_processes`` files (``n_shards``, as in the ``datasets`` library) distributes them with its own
    ``shard``; with any other, every process reads everything and keeps its part.
    """
    dataset = loader.dataset
    if not split_batches and hasattr(dataset, "shard") and getattr(dataset, "n_shards", 0) >= num_processes:
        sharded: IterableDataset[Any] = dataset.shard(num_shards=num_processes, index=process_index)
        return sharded
    if loader.batch_size is None:
        raise InvalidArgument(
            f"an iterable dataset with batch_size=None cannot be divided among {num_processes} processes: "
            "give the DataLoader a batch_size, or let one process read for all with dispatch_batches=True"
        )
    part = IterableDatasetShard(
        dataset,
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        num_processes=num_processes,
        process_index=process_index,
        split_batches=split_batches,
    )
    if loader.num_workers == 1:
        part.share_remainder()
    return part


def skipping(loader: Any, batches: int) -> dict[str, Any]:
    """The arguments of torch's ``DataLoader`` that skip the first ``batches`` batches without reading them."""
    if loader.batch_sampler is None:
        return {"sampler": SkipBatchSampler(loader.sampler, batches), "batch_size": None}
    return {"batch_sampler": SkipBatchSampler(loader.batch_sampler, batches)}


def drawing_from(loader: Any, state: torch.Tensor) -> dict[str, Any]:
    """The arguments of torch's ``DataLoader`` whose samplers draw from torch's global generator in ``state``."""
    if loader.batch_sampler is None:
        return {"sampler": RedrawnSampler(loader.sampler, state), "batch_size": None}
    return {"batch_sampler": RedrawnSampler(loader.batch_sampler, state)}
