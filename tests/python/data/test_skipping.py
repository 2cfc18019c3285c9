"""Items left out of samplers: the same rest as walking over them, with the same state after it, and no walk."""

from __future__ import annotations

import weakref
from itertools import islice

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, WeightedRandomSampler

from accelerate_cpp.data.samplers import (
    BatchSamplerShard,
    RepeatableRandomSampler,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate_cpp.data.skipping import keeping
from accelerate_cpp.data_loader import prepare_data_loader, skip_first_batches

MANY = 10**6


def samplers(generator):
    data = range(10)
    return [
        SequentialSampler(data),
        RandomSampler(data, generator=generator),
        RandomSampler(data, generator=generator, num_samples=7),
        RandomSampler(data, generator=generator, num_samples=25),
        RandomSampler(data, generator=generator, num_samples=20),
        RandomSampler(data, generator=generator, num_samples=50, replacement=True),
        RandomSampler(data),
        RepeatableRandomSampler(data),
        RepeatableRandomSampler(data, generator=generator, num_samples=25),
        SeedableRandomSampler(data, data_seed=3),
        SeedableRandomSampler(data, data_seed=3, num_samples=25),
        SeedableRandomSampler(data, data_seed=3, computed=True),
        SeedableRandomSampler(data, data_seed=-(2**70), num_samples=7, computed=True),
        SeedableRandomSampler(data, data_seed=3, num_samples=25, computed=True),
        SeedableRandomSampler(data, data_seed=3, num_samples=20),
        SeedableRandomSampler(data, data_seed=3, num_samples=50, replacement=True),
        WeightedRandomSampler([0.5] * 10, 12, generator=generator),
        list("abcdefghij"),
        BatchSampler(RandomSampler(data, generator=generator), 3, False),
        BatchSampler(RandomSampler(data, generator=generator), 3, True),
        [[0, 1], [2], [3, 4, 5], [6]],
    ]


@pytest.mark.parametrize("which", range(len(samplers(None))))
@pytest.mark.parametrize("ranges", [[(0, None)], [(3, None)], [(0, 2), (3, None)], [(0, 2), (2, None)], [(40, None)]])
def test_the_rest_is_that_of_a_walk_and_leaves_the_same_state(which, ranges):
    torch.manual_seed(1)
    first, second = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    state = torch.get_rng_state()
    whole = list(samplers(first)[which])
    walked = torch.get_rng_state()
    torch.set_rng_state(state)
    sampler = samplers(second)[which]
    expected = [item for start, stop in ranges for item in whole[start:stop]]
    assert list(keeping(sampler, ranges)) == expected
    assert torch.equal(first.get_state(), second.get_state())
    assert torch.equal(torch.get_rng_state(), walked)


def test_the_order_is_that_of_torch():
    for options in ({}, {"num_samples": 23}, {"replacement": True, "num_samples": 40}):
        torch.manual_seed(3)
        expected = list(RandomSampler(range(10), **options))
        torch.manual_seed(3)
        assert list(RepeatableRandomSampler(range(10), **options)) == expected


def test_a_shuffled_order_may_be_longer_than_any_memory():
    batches = BatchSampler(SeedableRandomSampler(range(4 * 10**12 + 2), data_seed=1, computed=True), 4, False)
    (last,) = keeping(batches, [(10**12, None)])
    first = next(iter(batches))
    assert len(last) == 2
    assert len({*first, *last}) == 6


@pytest.mark.parametrize("samples", [MANY, 2**31 - 1, 2**31])
@pytest.mark.parametrize("make", [RandomSampler, SeedableRandomSampler])
def test_one_permutation_is_in_memory_with_as_few_bytes_as_suffice(samples, make, monkeypatch):
    """Of the longer ones torch is asked for the numbers only, which take gigabytes."""
    asked, drawn, permute = [], [], torch.randperm

    def recorded(length, *, generator, dtype):
        assert all(permutation() is None for permutation in drawn)
        asked.append((length, dtype))
        permutation = permute(min(length, MANY), generator=generator, dtype=dtype)
        drawn.append(weakref.ref(permutation.untyped_storage()))
        return permutation

    monkeypatch.setattr(torch, "randperm", recorded)
    sampler = make(range(samples), num_samples=2 * MANY)
    next(keeping(sampler, [(3, None)]))
    assert asked == [(samples, torch.int32 if samples < 2**31 else torch.int64)]
    if samples == MANY:
        assert sum(1 for _ in keeping(sampler, [(MANY - 10, None)])) == MANY + 10


def test_four_bytes_give_the_same_permutation_as_eight():
    for samples in (1, 2, 1000, MANY):
        short, long = (
            torch.randperm(samples, generator=torch.Generator().manual_seed(8), dtype=dtype)
            for dtype in (torch.int32, torch.int64)
        )
        assert torch.equal(short.long(), long)


@pytest.mark.parametrize("num_samples", [7, 20, 25])
@pytest.mark.parametrize("computed", [False, True])
def test_a_seed_shuffles_each_round_of_the_samples_anew(num_samples, computed):
    order = list(SeedableRandomSampler(range(10), data_seed=5, num_samples=num_samples, computed=computed))
    rounds = [order[start : start + 10] for start in range(0, num_samples, 10)]
    assert len(order) == num_samples
    assert all(len(set(one)) == len(one) for one in rounds)
    assert len({tuple(one) for one in rounds}) == len(rounds)
    assert order != sorted(order)


def test_a_sampler_that_changes_the_order_of_ours_is_walked():
    class Reversed(SeedableRandomSampler):
        def __iter__(self):
            return iter(range(9, -1, -1))

    assert list(keeping(Reversed(range(10), data_seed=1), [(8, None)])) == [1, 0]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", range(1, 26))
def test_a_shard_can_be_skipped_into(samples, drop_last, even, split):
    for rank in range(2):
        shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(samples)), 4, drop_last), 2, rank, split, even)
        whole = list(shard)
        remainder = shard.remainder
        for skipped in range(5):
            assert list(SkipBatchSampler(shard, skipped)) == whole[skipped:]
            if whole[skipped:]:
                assert shard.remainder == remainder
            assert list(SkipBatchSampler(SkipBatchSampler(shard, 1), skipped)) == whole[skipped + 1 :]


def test_a_shard_of_irregular_batches_can_be_skipped_into():
    shard = BatchSamplerShard([[0, 1], [2], [3, 4], [5]], 2, 1, even_batches=False)
    assert list(SkipBatchSampler(shard, 1)) == [[5]]


class Walked(SequentialSampler):
    """Counts how many of its indices are made."""

    def __iter__(self):
        self.made = 0
        for index in super().__iter__():
            self.made += 1
            yield index


class Counted:
    """A dataset that counts its reads."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 2 * MANY + 10

    def __getitem__(self, index):
        self.reads += 1
        return index


@pytest.mark.parametrize("options", [{}, {"shuffle": True}], ids=["in order", "shuffled"])
@pytest.mark.parametrize("seedable", [False, True, "computed"])
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_million_skipped_batches_are_neither_read_nor_walked(options, seedable, dispatch, monkeypatch):
    made = []
    iterate = SequentialSampler.__iter__
    monkeypatch.setattr(SequentialSampler, "__iter__", lambda self: made.append(self) or iterate(self))
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: pytest.fail("the random sampler is walked"))
    dataset = Counted()
    loader = prepare_data_loader(
        DataLoader(dataset, batch_size=2, **options),
        torch.device("cpu"),
        put_on_device=True,
        use_seedable_sampler=seedable,
        dispatch_batches=dispatch,
    )
    assert len(list(skip_first_batches(loader, MANY))) == 5
    assert dataset.reads == 10
    assert made == []


def test_what_is_skipped_of_an_unknown_sampler_is_walked():
    sampler = Walked(range(8))
    assert list(islice(keeping(sampler, [(3, None)]), 2)) == [3, 4]
    assert sampler.made == 5
