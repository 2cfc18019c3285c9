"""Prepared loaders in one process, with simulated ranks where sharding matters."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle

import accelerate.data_loader as original
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from accelerate_cpp import data_loader
from accelerate_cpp.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    SeedableRandomSampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.accumulation import Accumulation


class Stream(IterableDataset):
    """``samples`` numbers, with or without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(range(self.samples))


class SizedStream(Stream):
    def __len__(self):
        return self.samples


class Counting(list):
    """A dataset that knows which of its samples were read."""

    def __init__(self, samples):
        super().__init__(samples)
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


@pytest.fixture(autouse=True)
def accumulation(monkeypatch):
    """A fresh state of accumulation for each test."""
    monkeypatch.setattr(current, "accumulation", Accumulation())
    return current.accumulation


def shards(loader, world_size, **options):
    """The prepared loader of each of ``world_size`` simulated ranks."""
    return [
        prepare_data_loader(loader, num_processes=world_size, process_index=rank, **options)
        for rank in range(world_size)
    ]


def gathered_for_metrics(prepared):
    """All samples that a loop over all ranks sees which gathers each step and drops what was added to the last."""
    seen = []
    for step in zip(*prepared, strict=True):
        (state,) = {(loader.end_of_dataloader, loader.remainder) for loader in prepared}
        is_last, remainder = state
        rows = torch.cat(step).tolist()
        seen += rows[:remainder] if is_last and remainder > 0 else rows
    return seen


@pytest.mark.parametrize(
    "name",
    [
        "BatchSamplerShard",
        "DataLoaderDispatcher",
        "DataLoaderShard",
        "IterableDatasetShard",
        "SeedableRandomSampler",
        "SkipBatchSampler",
        "SkipDataLoader",
        "get_sampler",
        "prepare_data_loader",
        "skip_first_batches",
    ],
)
def test_signatures_are_those_of_the_original(name):
    def shape(function):
        parameters = inspect.signature(function).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert shape(getattr(data_loader, name)) == shape(getattr(original, name))


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 30), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.booleans(), st.sampled_from([0, 1, 2])
)
def test_every_sample_is_gathered_exactly_once(samples, batch_size, world_size, drop_last, split, kind):
    if split:
        batch_size *= world_size
    dataset = [list(range(samples)), Stream(samples), SizedStream(samples)][kind]
    loader = DataLoader(dataset, batch_size=batch_size, drop_last=drop_last)
    prepared = shards(loader, world_size, split_batches=split)
    global_batch = batch_size if split else batch_size * world_size
    kept = samples - samples % global_batch if drop_last else samples
    assert gathered_for_metrics(prepared) == list(range(kept))
    if kind != 1:
        assert {len(shard) for shard in prepared} == {-(-kept // global_batch)}


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(0, 5), st.booleans())
def test_skipping_leaves_out_steps_and_nothing_else(samples, batch_size, world_size, split, skipped, stream):
    if split:
        batch_size *= world_size
    loader = DataLoader(SizedStream(samples) if stream else list(range(samples)), batch_size=batch_size)
    prepared = shards(loader, world_size, split_batches=split)
    whole = [len(shard) for shard in prepared]
    later = [skip_first_batches(shard, skipped) for shard in prepared]
    global_batch = batch_size if split else batch_size * world_size
    assert gathered_for_metrics(later) == list(range(samples))[skipped * global_batch :]
    assert [len(shard) for shard in later] == [max(0, length - skipped) for length in whole]
    assert gathered_for_metrics(prepared) == list(range(samples))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_remainder_is_right_with_worker_processes(workers):
    loader = DataLoader(list(range(7)), batch_size=2, num_workers=workers)
    assert gathered_for_metrics(shards(loader, 2)) == list(range(7))


def test_the_remainder_is_right_for_a_batch_sampler_of_ones_own():
    loader = DataLoader(list(range(7)), batch_sampler=[[0, 1], [2, 3], [4, 5], [6]])
    assert gathered_for_metrics(shards(loader, 3)) == list(range(7))
    batches = DataLoader(list(range(5)), batch_sampler=[[0, 1], [2], [3, 4]])
    prepared = shards(batches, 2)
    assert [shard.remainder for shard in prepared] == [-1, -1]
    list(zip(*prepared, strict=True))
    assert [shard.remainder for shard in prepared] == [2, 2]


def test_the_remainder_follows_the_sampler_not_the_dataset():
    loader = DataLoader(list(range(10)), batch_size=4, sampler=RandomSampler(range(10), num_samples=7))
    assert len(gathered_for_metrics(shards(loader, 2))) == 7
    assert len(gathered_for_metrics(shards(loader, 1))) == 7


def test_remainder_and_end_are_known_while_batches_come():
    (shard,) = shards(DataLoader(range(5), batch_size=2), 1)
    seen = [(shard.remainder, shard.end_of_dataloader, current.accumulation.reading.end_of_dataloader) for _ in shard]
    assert seen == [(1, False, False), (1, False, False), (1, True, True)]
    (dropping,) = shards(DataLoader(range(5), batch_size=2, drop_last=True), 1)
    assert [dropping.remainder for _ in dropping] == [-1, -1]


def test_without_even_batches_nothing_is_dropped():
    first, second = shards(DataLoader(list(range(7)), batch_size=3), 2, even_batches=False)
    assert [batch.tolist() for batch in first] == [[0, 1, 2], [6]]
    assert [batch.tolist() for batch in second] == [[3, 4, 5]]
    assert (first.remainder, second.remainder) == (0, 0)


def test_sizes_are_those_of_all_processes_together():
    loader = DataLoader(range(10), batch_size=2)
    whole, split = shards(loader, 2)[0], shards(loader, 2, split_batches=True)[0]
    assert (whole.total_batch_size, whole.total_dataset_length, len(whole)) == (4, 10, 3)
    assert (split.total_batch_size, split.total_dataset_length, len(split)) == (2, 10, 5)
    stream = shards(DataLoader(SizedStream(10), batch_size=2), 2)[0]
    assert (stream.total_batch_size, stream.total_dataset_length, len(stream)) == (4, 10, 3)


def test_a_batch_that_cannot_be_cut_is_refused_in_one_sentence():
    with pytest.raises(
        ValueError,
        match=r"^split_batches=True cuts .* multiple of the number of processes \(2\)$",
    ):
        shards(DataLoader(range(9), batch_size=3), 2, split_batches=True)
    with pytest.raises(ValueError, match=r"the batch size \(None\)"):
        shards(DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]]), 2, split_batches=True)


def test_dispatching_needs_a_device():
    with pytest.raises(ValueError, match="needs put_on_device=True"):
        prepare_data_loader(DataLoader(range(4)), dispatch_batches=True)


def test_a_mesh_is_refused():
    with pytest.raises(InvalidArgument, match="torch_device_mesh"):
        prepare_data_loader(DataLoader(range(4)), torch_device_mesh=object())


def test_iterable_datasets_are_dispatched_when_put_on_a_device():
    loader = DataLoader(Stream(4), batch_size=2)
    assert type(prepare_data_loader(loader, torch.device("cpu"), put_on_device=True)) is DataLoaderDispatcher
    assert type(prepare_data_loader(loader)) is DataLoaderShard
    assert type(prepare_data_loader(DataLoader(range(4)), torch.device("cpu"), put_on_device=True)) is DataLoaderShard


def test_the_callers_list_of_random_types_is_not_changed():
    kinds = ["generator"]
    (shard,) = shards(DataLoader(range(4)), 1, rng_types=kinds)
    assert kinds == ["generator"]
    assert shard.rng_types == []


def test_batches_are_moved_to_the_device():
    shard = prepare_data_loader(
        DataLoader([{"x": 1}, {"x": 2}], batch_size=2), torch.device("meta"), put_on_device=True
    )
    assert [batch["x"].device.type for batch in shard] == ["meta"]


def test_a_loader_is_active_exactly_while_it_is_read(accumulation):
    outer, inner = shards(DataLoader(range(4), batch_size=2), 1) + shards(DataLoader(range(2), batch_size=2), 1)
    active = []
    for _ in outer:
        active.append(accumulation.reading.active_loader)
        for _ in inner:
            active.append(accumulation.reading.active_loader)
    assert [loader is outer for loader in active] == [True, False, True, False]
    assert accumulation.reading.active_loader is None


def test_leaving_a_loop_early_leaves_no_active_loader(accumulation):
    (train,), (evaluation,) = (shards(DataLoader(range(8), batch_size=2), 1) for _ in range(2))
    for _ in train:
        for _ in evaluation:
            break
        assert accumulation.reading.active_loader is train
        with pytest.raises(KeyError):
            for _ in evaluation:
                raise KeyError
        gc.collect()
        assert accumulation.reading.active_loader is train
        batches = iter(evaluation)
        next(batches)
        assert accumulation.reading.active_loader is evaluation
        batches.close()
        assert accumulation.reading.active_loader is train
    assert accumulation.reading.active_loader is None


def test_an_abandoned_iterator_leaves_no_active_loader_once_it_is_collected(accumulation):
    outer, inner = (shards(DataLoader(range(4), batch_size=2), 1)[0] for _ in range(2))
    for _ in outer:
        cycle = {"batches": iter(inner)}
        cycle["itself"] = cycle
        next(cycle["batches"])
        assert accumulation.reading.active_loader is inner
        del cycle
        gc.collect()
        assert accumulation.reading.active_loader is outer
    assert accumulation.reading.active_loader is None


def test_an_abandoned_iterator_does_not_end_a_later_one_over_the_same_loader(accumulation):
    (loader,) = shards(DataLoader(range(4), batch_size=2), 1)
    abandoned = iter(loader)
    next(abandoned)
    for _ in loader:
        abandoned.close()
        assert accumulation.reading.active_loader is loader
    assert accumulation.reading.active_loader is None
    assert loader.iteration == 1


def test_an_error_in_the_dataset_leaves_no_active_loader(accumulation):
    (shard,) = shards(DataLoader({0: 1}, batch_size=1, sampler=[0, 1]), 1)
    with pytest.raises(KeyError):
        list(shard)
    assert accumulation.reading.active_loader is None


def test_only_complete_passes_count():
    (shard,) = shards(DataLoader(range(4), batch_size=2), 1)
    next(iter(shard))
    assert shard.iteration == 0
    list(shard)
    assert shard.iteration == 1
    shard.set_epoch(5)
    list(shard)
    assert shard.iteration == 6


def test_the_epoch_reaches_a_dataset_behind_a_shard():
    class Epochs(SizedStream):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    dataset = Epochs(4)
    first, _ = shards(DataLoader(dataset, batch_size=2), 2)
    first.set_epoch(3)
    assert dataset.epoch == 3


def test_epochs_of_a_seedable_sampler_differ_and_repeat():
    loader = DataLoader(list(range(20)), batch_size=20, shuffle=True)
    (shard,) = shards(loader, 1, use_seedable_sampler=True, data_seed=3)
    assert isinstance(shard.get_sampler(), SeedableRandomSampler)
    first, second = (next(iter(list(shard))).tolist() for _ in range(2))
    assert first != second
    shard.set_epoch(0)
    assert next(iter(shard)).tolist() == first


def test_a_sampler_can_be_replaced_behind_a_shard():
    first, _ = shards(DataLoader(list(range(4)), batch_size=1), 2)
    first.set_sampler([3, 2, 1, 0])
    assert [batch.tolist() for batch in first] == [[3], [1]]


def test_a_prepared_loader_passes_for_a_torch_loader_and_pickles():
    (shard,) = shards(DataLoader(range(4), batch_size=2), 1)
    assert isinstance(shard, DataLoader)
    assert shard.__class__ is DataLoader
    assert type(shard) is DataLoaderShard
    assert shard.num_workers == 0
    restored = pickle.loads(pickle.dumps(shard))
    assert type(restored) is DataLoaderShard
    assert [batch.tolist() for batch in restored] == [[0, 1], [2, 3]]


def test_skipped_samples_are_not_read():
    dataset = Counting(range(8))
    (shard,) = shards(DataLoader(dataset, batch_size=2), 1)
    list(skip_first_batches(shard, 3))
    assert dataset.read == [6, 7]


def test_skipping_keeps_everything_else():
    (shard,) = shards(DataLoader(range(8), batch_size=2, drop_last=True), 1, non_blocking=True)
    shard._is_accelerate_prepared = True
    shard.set_epoch(4)
    later = skip_first_batches(shard, 1)
    assert type(later) is DataLoaderShard
    assert later._is_accelerate_prepared
    assert (later.iteration, later._drop_last, later._non_blocking) == (4, True, True)
    assert [batch.tolist() for batch in skip_first_batches(later, 1)] == [[4, 5], [6, 7]]


def test_a_loader_that_is_not_prepared_can_be_skipped():
    loader = DataLoader(range(6), batch_size=2)
    later = skip_first_batches(loader, 2)
    assert type(later) is DataLoader
    assert [batch.tolist() for batch in later] == [[4, 5]]
    assert len(list(loader)) == 3
    stream = skip_first_batches(DataLoader(Stream(6), batch_size=2), 2)
    assert [batch.tolist() for batch in stream] == [[4, 5]]
    with pytest.raises(InvalidArgument, match="prepare it first"):
        prepare_data_loader(stream)


def test_skipping_backwards_is_refused():
    with pytest.raises(InvalidArgument, match="num_batches=-1"):
        skip_first_batches(DataLoader(range(4)), -1)


def dispatcher(loader, **options):
    return prepare_data_loader(loader, torch.device("cpu"), put_on_device=True, dispatch_batches=True, **options)


def test_a_dispatcher_alone_gives_all_batches():
    loader = dispatcher(DataLoader(range(5), batch_size=2))
    seen = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
    assert seen == [([0, 1], False), ([2, 3], False), ([4], True)]
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader), loader.iteration) == (2, 5, 3, 1)
    assert list(dispatcher(DataLoader(Stream(0), batch_size=2))) == []


def test_a_dispatcher_can_be_skipped_and_copied():
    later = skip_first_batches(dispatcher(DataLoader(range(6), batch_size=2)), 1)
    assert type(copy.copy(later)) is DataLoaderDispatcher
    assert [batch.tolist() for batch in later] == [[2, 3], [4, 5]]
    stream = skip_first_batches(dispatcher(DataLoader(Stream(6), batch_size=2)), 2)
    assert [batch.tolist() for batch in stream] == [[4, 5]]


def test_rows_are_taken_by_the_callers_function():
    calls = []

    def take(batch, rows, process_index=None, num_processes=None):
        calls.append((rows.start, rows.stop, process_index, num_processes))
        return batch[rows]

    list(dispatcher(DataLoader(range(4), batch_size=2), slice_fn_for_dispatch=take))
    assert calls == [(0, 2, 0, 1), (0, 2, 0, 1)]
