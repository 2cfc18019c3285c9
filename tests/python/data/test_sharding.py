"""The arithmetic of sharding, with simulated ranks: against the original and against what must hold for any input."""

from __future__ import annotations

import itertools

import pytest
from accelerate.data_loader import BatchSamplerShard as OriginalBatchSamplerShard
from accelerate.data_loader import IterableDatasetShard as OriginalIterableDatasetShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate_cpp.data import sharding
from accelerate_cpp.data.samplers import BatchSamplerShard, IterableDatasetShard
from accelerate_cpp.errors import InvalidArgument

SAMPLES = st.integers(0, 40)
BATCH_SIZE = st.integers(1, 7)
WORLD_SIZE = st.integers(1, 4)


def sequential_batches(samples: int, batch_size: int, drop_last: bool = False) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(samples)), batch_size, drop_last)


def run(generator):
    """Everything that a generator yields, and what it returns."""
    items = []
    while True:
        try:
            items.append(next(generator))
        except StopIteration as stop:
            return items, stop.value


def deal(batches, world_size, batch_size, drop_last=False, even=True, split=False):
    """Per rank: its batches; and the remainder, on which all ranks must agree."""
    function = sharding.slice_batches if split else sharding.deal_batches
    results = [
        run(function(batches, rank=rank, world_size=world_size, batch_size=batch_size, drop_last=drop_last, even=even))
        for rank in range(world_size)
    ]
    (remainder,) = {remainder for _, remainder in results}
    return [[list(batch) for batch in batches] for batches, _ in results], remainder


def gathered_and_truncated(per_rank, remainder):
    """What a training loop sees that gathers each step over the ranks and truncates the last one."""
    seen = []
    steps = list(zip(*per_rank, strict=True))
    for index, step in enumerate(steps):
        rows = [sample for part in step for sample in part]
        seen += rows[:remainder] if remainder and index == len(steps) - 1 else rows
    return seen


def test_a_round_is_completed_from_the_first_batches():
    assert deal([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]], 2, 3) == (
        [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 0]]],
        5,
    )


def test_leftovers_stay_short_without_even_batches():
    assert deal([[0, 1, 2], [3, 4, 5], [6]], 2, 3, even=False) == ([[[0, 1, 2], [6]], [[3, 4, 5]]], 0)


def test_only_full_rounds_are_kept_with_drop_last():
    assert deal([[0, 1, 2], [3, 4, 5], [6, 7, 8]], 2, 3, drop_last=True) == ([[[0, 1, 2]], [[3, 4, 5]]], 0)


def test_one_sample_is_repeated_until_every_rank_has_a_batch():
    assert deal([[0]], 2, 2) == ([[[0, 0]], [[0, 0]]], 1)


def test_a_short_batch_is_completed_from_the_first_when_split():
    per_rank, remainder = deal([[0, 1, 2, 3], [4, 5]], 2, 4, split=True)
    assert (per_rank, remainder) == ([[[0, 1], [4, 5]], [[2, 3], [0, 1]]], 2)


def test_batches_of_varying_length_are_completed_by_whole_batches():
    assert deal([[0], [1, 2, 3], [4, 5]], 2, None) == ([[[0], [4, 5]], [[1, 2, 3], [0]]], 2)


def test_a_short_batch_in_the_middle_is_not_lost():
    per_rank, _ = deal([[0, 1], [2], [3, 4], [5, 6]], 2, 2)
    assert per_rank == [[[0, 1], [3, 4]], [[2], [5, 6]]]


def test_a_batch_longer_than_its_batch_size_is_refused_when_split():
    with pytest.raises(InvalidArgument, match="batch of 5 samples, more than its batch_size of 4"):
        deal([[0, 1, 2, 3, 4]], 2, 4, split=True)


@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_a_batch_that_cannot_be_cut_is_refused(batch_size):
    with pytest.raises(ValueError, match=r"needs to be a round multiple of the number of processes \(2\)"):
        sharding.check_divisible(batch_size, 2)


@settings(deadline=None, max_examples=300)
@given(SAMPLES, BATCH_SIZE, WORLD_SIZE, st.booleans(), st.booleans(), st.booleans())
def test_batch_shards_equal_the_original(samples, batch_size, world_size, drop_last, even, split):
    if split:
        batch_size *= world_size
    for rank in range(world_size):
        arguments = (world_size, rank, split, even)
        mine = BatchSamplerShard(sequential_batches(samples, batch_size, drop_last), *arguments)
        original = OriginalBatchSamplerShard(sequential_batches(samples, batch_size, drop_last), *arguments)
        assert list(mine) == list(original)
        assert len(mine) == len(original)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 5), max_size=12), WORLD_SIZE, st.booleans())
def test_batches_of_varying_length_equal_the_original(lengths, world_size, even):
    batches, start = [], 0
    for length in lengths:
        batches.append(list(range(start, start + length)))
        start += length
    for rank in range(world_size):
        mine = BatchSamplerShard(batches, world_size, rank, False, even)
        assert list(mine) == list(OriginalBatchSamplerShard(batches, world_size, rank, False, even))


@settings(deadline=None, max_examples=300)
@given(SAMPLES, BATCH_SIZE, WORLD_SIZE, st.booleans(), st.booleans())
def test_every_sample_is_gathered_exactly_once(samples, batch_size, world_size, drop_last, split):
    if split:
        batch_size *= world_size
    batches = list(sequential_batches(samples, batch_size, drop_last))
    per_rank, remainder = deal(batches, world_size, batch_size, drop_last=drop_last, split=split)
    global_batch = batch_size if split else batch_size * world_size
    kept = samples - samples % global_batch if drop_last else samples
    assert gathered_and_truncated(per_rank, remainder) == list(range(kept))


@settings(deadline=None, max_examples=200)
@given(SAMPLES, BATCH_SIZE, WORLD_SIZE, st.booleans())
def test_without_even_batches_every_sample_is_seen_exactly_once(samples, batch_size, world_size, split):
    if split:
        batch_size *= world_size
    per_rank, remainder = deal(
        list(sequential_batches(samples, batch_size)), world_size, batch_size, even=False, split=split
    )
    assert sorted(sample for batches in per_rank for batch in batches for sample in batch) == list(range(samples))
    assert remainder == 0


@settings(deadline=None, max_examples=200)
@given(SAMPLES, BATCH_SIZE, WORLD_SIZE, st.booleans(), st.booleans())
def test_iterable_shards_equal_the_original(samples, batch_size, world_size, drop_last, split):
    if split:
        batch_size *= world_size
    options = {"batch_size": batch_size, "drop_last": drop_last, "num_processes": world_size, "split_batches": split}
    for rank in range(world_size):
        mine = IterableDatasetShard(range(samples), process_index=rank, **options)
        assert list(mine) == list(OriginalIterableDatasetShard(range(samples), process_index=rank, **options))
        assert len(mine) == len(list(mine))


@settings(deadline=None, max_examples=200)
@given(SAMPLES, st.integers(1, 5), WORLD_SIZE, st.booleans())
def test_iterable_shards_give_every_sample_exactly_once(samples, part, world_size, drop_last):
    results = [
        run(
            sharding.deal_samples(
                range(samples), rank=rank, world_size=world_size, global_batch=part * world_size, drop_last=drop_last
            )
        )
        for rank in range(world_size)
    ]
    (remainder,) = {remainder for _, remainder in results}
    per_rank = [list(sharding.rounds(items, part)) for items, _ in results]
    kept = samples - samples % (part * world_size) if drop_last else samples
    assert gathered_and_truncated(per_rank, remainder) == list(range(kept))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.booleans())
def test_dispatched_rows_are_all_given_out(sizes, world_size, split):
    sizes = sizes[:1] if split else sizes[:world_size]
    bounds = sharding.dispatch_bounds(sizes, world_size=world_size, split=split, complete=True)
    assert bounds[0] == 0
    assert len(bounds) == world_size + 1
    assert sum(sizes) <= bounds[-1] < sum(sizes) + world_size
    assert len({stop - start for start, stop in itertools.pairwise(bounds)}) == 1


def test_each_rank_gets_its_own_batch_of_unequal_ones():
    assert sharding.dispatch_bounds([3, 2, 4], world_size=3, split=False, complete=False) == [0, 3, 5, 9]


def test_a_dispatched_batch_that_cannot_be_cut_is_refused():
    with pytest.raises(InvalidArgument, match="batch of 5 samples cannot be cut into 2 equal parts"):
        sharding.dispatch_bounds([5], world_size=2, split=True, complete=False)


def test_the_last_item_is_known_when_it_is_given_out():
    assert list(sharding.with_last("abc")) == [("a", False), ("b", False), ("c", True)]
    assert list(sharding.with_last([])) == []


def test_an_item_is_transformed_before_the_next_one_is_read():
    events = []

    def source():
        for item in (1, 2):
            events.append(f"read {item}")
            yield item

    def move(item):
        events.append(f"move {item}")
        return item

    next(sharding.with_last(source(), move))
    assert events == ["read 1", "move 1", "read 2"]
