"""Data loaders that know which samples are those of their process, and when the last batch has been returned."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.data import loaders, sharding, stateful
from accelerate_cpp.data.adapter import DataLoaderAdapter
from accelerate_cpp.data.batch_dispatch import Dispatch
from accelerate_cpp.data.cursor import Pass
from accelerate_cpp.data.loaders import get_sampler
from accelerate_cpp.data.reading import opened
from accelerate_cpp.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.devices.xla import XlaDevice, batches_ahead, xla_module
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.prepare.tracked_loader import DataLoaderStateMixin as DataLoaderStateMixin
from accelerate_cpp.prepare.tracked_loader import TrackedLoader
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.data_place import data_rank, data_ranks, data_size, reads_for_all, shares_batches
from accelerate_cpp.state import PartialState
from accelerate_cpp.utils import operations
from accelerate_cpp.utils.operations import broadcast_object_list, slice_tensors
from accelerate_cpp.utils.random import synchronize_rng_states

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]

_lent = lending("data_loader")


class DataLoaderShard(TrackedLoader):
    """A loader that reads this process's shard and moves batches to ``device``.

    Args:
        device: where batches go; ``None`` leaves them where they are.
        rng_types: generators whose state all processes copy from the first process before each pass.
        synchronized_generator: the generator that ``"generator"`` in ``rng_types`` means.
        skip_batches: the number of batches to skip at the start of each pass.
        kwargs: arguments of the torch ``DataLoader``.
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        _refuse_mesh(torch_device_mesh)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration

    @property
    def total_batch_size(self) -> int | None:
        shard = loaders.shard_of(self)
        if isinstance(shard, IterableDatasetShard):
            return shard.total_batch_size
        size: int | None = getattr(loaders.samplers_of(self)[0], "batch_size", None)
        return size if size is None or shard is None or shard.split_batches else size * shard.num_processes

    def _synchronize(self, continues: bool) -> None:
        kinds = self.rng_types
        if kinds is not None and continues:
            kinds = [kind for kind in kinds if getattr(kind, "value", kind) == "generator"]
        if kinds:
            synchronize_rng_states(kinds, self.synchronized_generator)
        sampler, shard = self.get_sampler(), loaders.shard_of(self)
        is_common = shard is not None or shares_batches()
        if isinstance(sampler, SeedableRandomSampler) and not sampler.has_own_seed and is_common:
            (sampler.initial_seed,) = broadcast_object_list([sampler.initial_seed])

    def _expected_remainder(self) -> int:
        shard = loaders.shard_of(self)
        completes = not isinstance(shard, BatchSamplerShard) or shard.even_batches
        return super()._expected_remainder() if completes else 0

    def _place(self, batch: Any) -> Any:
        if self.device is None:
            return batch
        kind_of(self.device).require_computable(batch)
        return operations.send_to_device(batch, self.device, non_blocking=self._non_blocking)

    def _placed(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Batches on the device, and whether each is the last.

        With ``non_blocking`` and pinned memory, a GPU gets the next batch while it computes with the one before.
        """
        beside = self.device is not None and self._non_blocking and self.pin_memory
        copies = kind_of(self.device).copy_stream(self.device) if self.device is not None and beside else None
        if copies is None:
            yield from sharding.with_last(batches, self._place)
            return
        for copying, is_last in sharding.with_last(map(copies.begin, batches)):
            yield copies.end(copying), is_last

    def _batches(self, reading: Pass) -> Iterator[tuple[Any, bool]]:
        source, mine = opened(self, reading)
        shard = loaders.shard_of(source)
        if shard is None and not self._drops_incomplete():
            self.remainder = loaders.expected_remainder(source, self.total_batch_size)
        for batch, is_last in self._placed(mine):
            if is_last and not self._drops_incomplete():
                # The shard's own count is right even if lengths were unknown or wrong.
                counted = None if shard is None else shard.remainder
                self.remainder = self.remainder if counted is None else counted
                self.completed = shard.completed if isinstance(shard, BatchSamplerShard) else ()
            yield batch, is_last


@functools.cache
def _loader_of_torch_xla() -> type[DataLoaderShard]:
    """:class:`DataLoaderShard` as a kind of torch_xla's ``MpDeviceLoader``, whose threads read batches ahead and send
    them to the device. Programs set options of its ``ParallelLoader``, such as ``input_sharding``, in
    ``_parallel_loader_kwargs``."""

    class MpDeviceLoaderWrapper(DataLoaderShard, xla_module("distributed.parallel_loader").MpDeviceLoader):  # type: ignore[misc]
        __qualname__ = "MpDeviceLoaderWrapper"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._parallel_loader_kwargs: dict[str, Any] = {}

        @property
        def dataloader(self) -> Any:
            """The loader that reads the part of this process."""
            return self.base_dataloader

        def _placed(self, batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
            if self.device is None or self.use_stateful_dataloader:  # its state is that of what has been read
                yield from super()._placed(batches)
                return
            shared = None if current.session is None else current.session.strategy.input_sharding()
            options = {"input_sharding": shared} | self._parallel_loader_kwargs
            with closing(batches_ahead(batches, self.device, options)) as sent:
                yield from sharding.with_last(sent, self._place)  # which moves what torch_xla does not look into

    return MpDeviceLoaderWrapper


def __getattr__(name: str) -> Any:
    return _loader_of_torch_xla() if name == "MpDeviceLoaderWrapper" else _lent(name)


class SkipDataLoader(DataLoaderShard):
    """A loader over a whole dataset that skips the first ``skip_batches`` batches of each pass.

    This class reads the skipped batches; ``skip_first_batches`` avoids that where possible.

    Args:
        kwargs: arguments of the torch ``DataLoader``.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skipped_steps = skip_batches


class DataLoaderDispatcher(TrackedLoader):
    """A loader that only reads on process 0, and sends every process its part of each global batch.

    Without ``split_batches``, process 0 reads one batch per process, and each process gets one of them, even if their
    lengths differ; with it, one batch is cut into equal parts. Other processes never read their dataset. An error while
    reading is raised on all of them.

    Args:
        skip_batches: the number of steps to skip at the start of each pass.
        slice_fn: called as ``slice_fn(batch, rows, process_index=…, num_processes=…)`` to take rows from a batch.
        kwargs: arguments of the torch ``DataLoader``.
    """

    dispatches = True
    # Data is divided among all processes: a mesh is refused.
    torch_device_mesh: None = None
    submesh_tp: None = None
    submesh_dp: None = None
    submesh_fsdp: None = None

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        _refuse_mesh(torch_device_mesh)
        self.num_processes = data_size()
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self.slice_fn = slice_tensors if slice_fn is None else slice_fn
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.iteration = iteration

    @property
    def state(self) -> PartialState:
        """The processes to which batches are dispatched."""
        return PartialState()

    @property
    def batches_per_step(self) -> int:
        """Batches that process 0 reads for one step of all processes."""
        return 1 if self.split_batches else data_size()

    @property
    def total_batch_size(self) -> int | None:
        size: int | None = getattr(loaders.samplers_of(self)[0], "batch_size", None)
        return None if size is None else size * self.batches_per_step

    def __len__(self) -> int:
        steps, rest = divmod(len(self.base_dataloader), self.batches_per_step)
        return max(0, steps + (rest > 0 and not self._drops_incomplete()) - self.skip_batches)

    def _read(self, reading: Pass) -> Iterator[tuple[Any, list[int], bool]]:
        """On process 0: yields global batches, the lengths of the batches in each, and whether it is the last."""
        count = self.batches_per_step
        _, unread = opened(self, reading)
        steps = sharding.rounds(unread, count)
        if self._drops_incomplete():
            steps = (step for step in steps if len(step) == count)
        for step, is_last in sharding.with_last(steps):
            yield (
                operations.concatenate(step) if len(step) > 1 else step[0],
                [operations.find_batch_size(batch) for batch in step],
                is_last,
            )

    def _completed(self, reading: Pass, device: torch.device) -> Iterator[tuple[Any, list[int], bool]]:
        """The batches of :meth:`_read`, on the device, with rows of the first global batch added to the last one."""
        first = None
        for batch, sizes, is_last in self._read(reading):
            if self._completes and first is None:
                first = self._take(batch, 0, min(data_size(), sum(sizes)))
            while self._completes and is_last and operations.find_batch_size(batch) < self._bounds(sizes, is_last)[-1]:
                batch = operations.concatenate([batch, first])
            kind_of(device).require_computable(batch)
            yield operations.send_to_device(batch, device, non_blocking=self._non_blocking), sizes, is_last

    @property
    def _completes(self) -> bool:
        return data_size() > 1 and not self._drops_incomplete()

    def _bounds(self, sizes: list[int], is_last: bool) -> list[int]:
        return sharding.dispatch_bounds(
            sizes, world_size=data_size(), split=self.split_batches, complete=self._completes and is_last
        )

    def _batches(self, reading: Pass) -> Iterator[tuple[Any, bool]]:
        device = operations.collective_device() if self.device is None else self.device
        target, device = device, operations.exchanged_on(device)
        rank = data_rank()
        reader = self._completed(reading, device) if reads_for_all() else None
        if reader is None and isinstance(self.dataset, IterDataPipe):
            # torch creates a process group with the first iterator over a data pipe, which needs all processes.
            iter(self.base_dataloader)
        dispatch = Dispatch(reader, device, self.slice_fn is slice_tensors, data_ranks())
        while (step := dispatch.next_step()) is not None:
            bounds = self._bounds(step.sizes, step.is_last)
            part = dispatch.part(step, bounds, operations.broadcast)
            if not step.scattered:
                part = self._take(part, bounds[rank], bounds[rank + 1])
            if step.is_last:
                self.remainder = sum(step.sizes) if sum(step.sizes) < bounds[-1] else 0
                self.completed = [stop - start for start, stop in pairwise(bounds)]
            yield (part if target == device else operations.send_to_device(part, target)), step.is_last
            if step.is_last:
                return

    def _take(self, batch: Any, start: int, stop: int) -> Any:
        return self.slice_fn(batch, slice(start, stop), process_index=data_rank(), num_processes=data_size())


def _refuse_mesh(torch_device_mesh: Any) -> None:
    if torch_device_mesh is not None:
        raise InvalidArgument(
            "torch_device_mesh: sharding data over a mesh does not work in accelerate_cpp yet; leave it out: data is "
            "sharded over all processes"
        )


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool | str = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Returns a loader over this process's part of ``dataloader``.

    Args:
        device: where batches go if ``put_on_device``.
        num_processes, process_index: default to those that share out the data.
        split_batches: the loader's batch is the global one and cut into ``num_processes`` parts.
        rng_types: generators synchronised before each pass; ``"generator"`` is the sampler's, or an iterable dataset's.
        dispatch_batches: process 0 reads for all. Default: for iterable datasets if ``put_on_device``.
        even_batches: complete the last batches with samples from the start, so that all processes get the same number.
        slice_fn_for_dispatch: see ``slice_fn`` of :class:`DataLoaderDispatcher`.
        use_seedable_sampler: shuffle by a seed and the epoch; the seed is ``data_seed``, or process 0's of torch. The
            order is torch's, with ``"computed"`` one that takes no memory: see :class:`SeedableRandomSampler`.
        non_blocking: do not wait for copies to the device.

    Raises:
        InvalidArgument: a batch cannot be cut, dispatching without ``put_on_device``, or an option that does not work
            yet.
    """
    _refuse_mesh(torch_device_mesh)
    if getattr(dataloader, "skip_batches", 0):
        raise InvalidArgument(
            "skip_first_batches was called on a loader that is prepared now; prepare it first, then skip"
        )
    iterable = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and iterable
    if dispatch_batches and not put_on_device:
        raise InvalidArgument(
            "dispatch_batches=True sends batches to the device of each process, which needs put_on_device=True"
        )
    num_processes = data_size() if num_processes is None else num_processes
    process_index = data_rank() if process_index is None else process_index
    if split_batches:
        loaders.check_split(dataloader, num_processes, dispatched=dispatch_batches)
    seedable = use_seedable_sampler and loaders.use_seedable_sampler(dataloader, data_seed, use_seedable_sampler)
    loaders.use_repeatable_sampler(dataloader)
    common = loaders.options_of(dataloader) | {
        "use_stateful_dataloader": use_stateful_dataloader,
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
    }
    if dispatch_batches:
        common |= {"split_batches": split_batches, "slice_fn": slice_fn_for_dispatch}
        dispatcher = DataLoaderDispatcher(dataloader.dataset, **loaders.batching_of(dataloader), **common)
        dispatcher.device = device
        return dispatcher  # type: ignore[return-value]
    part = loaders.part_of(dataloader, num_processes, process_index, split_batches, even_batches)
    alone = num_processes == 1 and not shares_batches()
    generator = None if seedable or alone else loaders.shared_generator(dataloader)
    if rng_types is not None and generator is None:
        rng_types = [kind for kind in rng_types if getattr(kind, "value", kind) != "generator"]
    common |= {"device": device if put_on_device else None, "rng_types": rng_types, "synchronized_generator": generator}
    on_xla = device is not None and isinstance(kind_of(device), XlaDevice)
    shard = (_loader_of_torch_xla() if on_xla else DataLoaderShard)(**part, **common)
    shard.num_processes = num_processes
    return shard  # type: ignore[return-value]


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Returns a loader like ``dataloader`` that skips the first ``num_batches`` batches of each pass.

    For a prepared loader these are batches of the training loop, whatever the number of processes, and the result is
    also prepared. Skipped samples are not read, except from an iterable dataset. ``dataloader`` itself is not changed.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from accelerate_cpp import skip_first_batches
        >>> loader = DataLoader(range(6), batch_size=2)
        >>> [batch.tolist() for batch in skip_first_batches(loader, num_batches=1)]
        [[2, 3], [4, 5]]
    """
    if num_batches < 0:
        raise InvalidArgument(f"num_batches={num_batches}: a loader cannot skip fewer than 0 batches")
    prepared = isinstance(dataloader, DataLoaderAdapter)
    options = loaders.options_of(dataloader)
    if isinstance(dataloader.dataset, IterableDataset):
        skipping = (
            copy.copy(dataloader)
            if prepared
            else SkipDataLoader(dataloader.dataset, **loaders.batching_of(dataloader), **options)
        )
        skipping.skip_batches += num_batches
        skipping.skipped_steps += num_batches
        return skipping
    taken = dataloader.batches_per_step if prepared and dataloader.dispatches else 1
    batching = loaders.skipping(dataloader, num_batches * taken)
    if not prepared:
        return DataLoader(dataloader.dataset, **batching, **options)
    skipping = copy.copy(dataloader)
    skipping.base_dataloader = stateful.like(dataloader.base_dataloader, dataloader.dataset, **batching, **options)
    skipping.skipped_steps += num_batches
    return skipping
