"""Taking torch loaders apart."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accelerate_cpp.data import loaders
from accelerate_cpp.data.samplers import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from accelerate_cpp.errors import InvalidArgument


class Sharded(IterableDataset):
    """Four files of two samples each, which it deals out itself."""

    def __init__(self, files=((0, 1), (2, 3), (4, 5), (6, 7))):
        self.files = files
        self.n_shards = len(files)

    def shard(self, num_shards, index):
        return Sharded(self.files[index::num_shards])

    def __iter__(self):
        return (sample for file in self.files for sample in file)


def test_options_of_a_loader_are_taken_over():
    loader = DataLoader(range(4), batch_size=2, timeout=0, generator=torch.Generator())
    options = loaders.options_of(loader)
    assert options["generator"] is loader.generator
    assert options["collate_fn"] is loader.collate_fn
    assert not {"batch_size", "sampler", "drop_last"} & options.keys()


def test_the_index_sampler_is_found_behind_a_shard():
    loader = DataLoader(range(8), batch_size=2, shuffle=True)
    sharded = DataLoader(range(8), batch_sampler=BatchSamplerShard(loader.batch_sampler, 2, 0))
    assert loaders.get_sampler(sharded) is loader.sampler


def test_a_batch_sampler_of_ones_own_has_no_index_sampler():
    loader = DataLoader(range(4), batch_sampler=[[0, 1], [2, 3]])
    assert loaders.get_sampler(loader) is None
    with pytest.raises(InvalidArgument, match="does not use an index sampler"):
        loaders.replace_sampler(loader, SequentialSampler(range(4)))


def test_a_batch_sampler_given_as_sampler_is_sharded():
    loader = DataLoader(range(8), sampler=BatchSampler(SequentialSampler(range(8)), 2, False), batch_size=None)
    part = loaders.part_of(loader, 2, 1, split_batches=False, even_batches=True)
    assert list(part["sampler"]) == [[2, 3], [6, 7]]
    assert part["batch_size"] is None


def test_single_samples_cannot_be_divided_among_processes():
    with pytest.raises(InvalidArgument, match="batch_size=None gives single samples"):
        loaders.part_of(DataLoader(range(8), batch_size=None), 2, 0, split_batches=False, even_batches=True)


def test_a_dataset_of_enough_files_deals_them_out_itself():
    part = loaders.part_of(DataLoader(Sharded(), batch_size=2), 2, 1, split_batches=False, even_batches=True)
    assert list(part["dataset"]) == [2, 3, 6, 7]


def test_a_dataset_of_too_few_files_is_read_by_everyone():
    loader = DataLoader(Sharded(files=((0, 1, 2, 3), (4, 5))), batch_size=1)
    part = loaders.part_of(loader, 3, 2, split_batches=False, even_batches=True)
    assert list(part["dataset"]) == [2, 5]


def test_a_random_sampler_becomes_seedable_and_another_does_not():
    shuffled = DataLoader(range(8), batch_size=2, shuffle=True)
    assert loaders.use_seedable_sampler(shuffled, data_seed=1)
    assert isinstance(loaders.get_sampler(shuffled), SeedableRandomSampler)
    assert not loaders.use_seedable_sampler(DataLoader(range(8), batch_size=2), data_seed=1)


@pytest.mark.parametrize("order", [True, "computed"])
def test_the_order_of_a_seedable_sampler_is_chosen(order):
    shuffled = DataLoader(range(8), batch_size=2, shuffle=True)
    loaders.use_seedable_sampler(shuffled, 1, order)
    assert loaders.get_sampler(shuffled).computed is (order == "computed")


def test_a_sampler_whose_order_was_computed_keeps_it():
    shuffled = DataLoader(range(8), batch_size=2, sampler=SeedableRandomSampler(range(8), computed=True))
    assert loaders.use_seedable_sampler(shuffled, data_seed=1)
    assert loaders.get_sampler(shuffled).computed


def test_an_unknown_order_is_refused():
    shuffled = DataLoader(range(8), batch_size=2, shuffle=True)
    with pytest.raises(InvalidArgument, match="use_seedable_sampler='yes': expected True"):
        loaders.use_seedable_sampler(shuffled, 1, "yes")


def test_a_sampler_without_generator_gets_one_to_share():
    loader = DataLoader(range(8), batch_size=2, sampler=RandomSampler(range(8)))
    generator = loaders.shared_generator(loader)
    assert generator is not None
    assert loader.sampler.generator is generator
    assert loaders.shared_generator(loader) is generator
    assert loaders.shared_generator(DataLoader(range(8), batch_size=2)) is None


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(range(5), batch_size=2), 1),
        (DataLoader(range(8), batch_size=2), 0),
        (DataLoader(range(8), batch_size=2, sampler=RandomSampler(range(8), num_samples=7)), 3),
        (DataLoader(range(8), batch_sampler=[[0, 1], [2]]), -1),
        (DataLoader(Sharded(), batch_size=2), -1),
    ],
)
def test_the_remainder_follows_the_samples_that_are_drawn(loader, expected):
    assert loaders.expected_remainder(loader, 4) == expected


class Counted(IterableDataset):
    """Five samples, as it says."""

    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize(("workers", "expected"), [(0, 1), (1, 1), (2, -1), (3, -1)])
def test_the_remainder_of_a_stream_is_unknown_where_several_workers_complete_a_batch_each(workers, expected):
    shard = IterableDatasetShard(Counted(), batch_size=2, num_processes=2, process_index=0)
    loader = DataLoader(shard, batch_size=2, num_workers=workers)
    assert loaders.expected_remainder(loader, 4) == expected


@pytest.mark.parametrize(
    ("processes", "split", "deals"), [(2, False, True), (4, False, True), (5, False, False), (4, True, False)]
)
def test_files_are_dealt_out_where_there_are_enough_and_batches_are_not_split(processes, split, deals):
    loader = DataLoader(Sharded(), batch_size=20)
    part = loaders.part_of(loader, processes, 1, split_batches=split, even_batches=True)["dataset"]
    assert type(part) is (Sharded if deals else IterableDatasetShard)
    if deals:
        assert next(iter(part)) == 2
