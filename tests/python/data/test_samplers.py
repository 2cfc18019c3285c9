"""Samplers and dataset shards as objects: lengths, seeds, epochs, remainders."""

from __future__ import annotations

import accelerate.data_loader as original
import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate_cpp.data.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)


def test_the_order_depends_on_seed_and_epoch_alone():
    first, second = (SeedableRandomSampler(range(20), data_seed=3) for _ in range(2))
    torch.manual_seed(1)
    epochs = [list(first), list(first)]
    torch.manual_seed(2)
    assert [list(second), list(second)] == epochs
    assert epochs[0] != epochs[1]
    first.set_epoch(0)
    assert list(first) == epochs[0]


OPTIONS = [{}, {"num_samples": 7}, {"num_samples": 40}, {"num_samples": 45}, {"replacement": True, "num_samples": 70}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("data_seed", [None, 3, -(2**40), 2**63])
def test_the_order_of_each_epoch_is_that_of_the_original(options, own_generator, data_seed):
    found, expected = [], []
    for kind, orders in ((SeedableRandomSampler, found), (original.SeedableRandomSampler, expected)):
        torch.manual_seed(12)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        sampler = kind(range(20), generator=generator, data_seed=data_seed, **options)
        torch.manual_seed(13)  # the seed of torch's generator counts when the sampler is made
        orders += [list(sampler) for _ in range(3)]
        sampler.set_epoch(1)
        orders += [list(sampler), sampler.epoch, sampler.generator.get_state().tolist(), torch.get_rng_state().tolist()]
    assert found == expected


def test_an_order_that_is_computed_has_epochs_too():
    first, second = (SeedableRandomSampler(range(20), data_seed=3, computed=True) for _ in range(2))
    assert sorted(first) == list(range(20))
    second.set_epoch(1)
    assert list(first) == list(second)
    assert first.generator is None


def test_an_abandoned_pass_does_not_advance_the_epoch():
    sampler = SeedableRandomSampler(range(20), data_seed=3)
    next(iter(sampler))
    assert sampler.epoch == 0


def test_the_remainder_is_known_after_a_pass_and_unknown_during_one():
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(5)), 2, False), 2, 0)
    batches = iter(shard)
    next(batches)
    assert shard.remainder is None
    assert list(batches) == [[4, 0]]
    assert shard.remainder == 1
    assert (shard.total_length, len(shard)) == (3, 2)


def test_an_iterable_shard_seeds_a_dataset_that_has_only_a_generator():
    class Noise:
        generator = torch.Generator()

        def __iter__(self):
            return iter(torch.rand(4, generator=self.generator).tolist())

    shard = IterableDatasetShard(Noise(), batch_size=2)
    shard.set_epoch(7)
    first = list(shard)
    shard.set_epoch(8)
    assert list(shard) != first
    shard.set_epoch(7)
    assert list(shard) == first


def test_skipped_batches_are_left_out_and_not_counted():
    sampler = SkipBatchSampler(BatchSampler(SequentialSampler(range(7)), 2, False), 3)
    assert list(sampler) == [[6]]
    assert (len(sampler), sampler.total_length, sampler.batch_size) == (1, 4, 2)
    assert len(SkipBatchSampler(sampler, 5)) == 0
