"""Passes over loaders: how far they go, and what they show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from accelerate_cpp.check.loading import Loading
from accelerate_cpp.check.observed import CheckFinished, Observed
from accelerate_cpp.data_loader import prepare_data_loader

Found = Callable[[], dict[str, str]]


def loader(samples: int = 20, **options: object) -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(samples), batch_size=2, **options)


def read(loading: Loading, batches: DataLoader[torch.Tensor], is_prepared: bool = False) -> int:
    return len(list(loading.watched(batches, iter(batches), is_prepared)))


def train(observed: Observed, loading: Loading, batches: DataLoader[torch.Tensor], is_prepared: bool = True) -> int:
    """A pass with a step for each batch; how many there were."""
    number = 0
    for _ in loading.watched(batches, iter(batches), is_prepared):
        number += 1
        observed.backwards += 1
        observed.steps_of[0] = observed.steps_of.get(0, 0) + 1
    return number


def test_a_pass_without_training_ends_after_as_many_batches_as_steps_are_asked_for(observed: Observed) -> None:
    assert read(Loading(observed), loader()) == 2


def test_a_pass_that_trains_ends_after_its_steps_and_is_not_begun_again(observed: Observed) -> None:
    loading, batches = Loading(observed), loader()
    for _ in loading.watched(batches, iter(batches), True):
        observed.backwards += 1
        observed.steps_of[0] = observed.backwards // 2
    assert observed.backwards == 4
    with pytest.raises(CheckFinished):
        read(loading, batches)


def test_a_short_loader_is_read_to_its_end_and_again(observed: Observed) -> None:
    loading, batches = Loading(observed), loader(2)
    assert [train(observed, loading, batches), train(observed, loading, batches)] == [1, 1]


def test_training_on_a_loader_that_is_not_prepared_is_an_error(observed: Observed, found: Found) -> None:
    loading = Loading(observed)
    train(observed, loading, loader(), is_prepared=False)
    loading.conclude()
    assert found() == {"unprepared-loader": "error"}


def test_a_loader_that_shares_out_its_data_itself_may_stay_unprepared(observed: Observed, found: Found) -> None:
    loading = Loading(observed)
    data = torch.arange(20)
    own = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    train(observed, loading, own, is_prepared=False)
    loading.conclude()
    assert found() == {}
    loading.prepares(own)
    assert found() == {"sharded-twice": "error"}


@pytest.mark.parametrize(
    ("gathers", "expected"),
    [
        ((), {"uneven-tail": "note"}),
        (("gather_for_metrics",), {}),
        (("gather_for_metrics", "gather"), {}),  # such as a count of samples beside them
        (("gather",), {"gather-on-uneven-tail": "warning"}),
    ],
)
def test_repeated_samples_matter_where_they_are_gathered(
    observed: Observed, found: Found, gathers: tuple[str, ...], expected: dict[str, str]
) -> None:
    loading = Loading(observed)
    shard = prepare_data_loader(loader(18 + 3), torch.device("cpu"), num_processes=2, process_index=0)
    for _ in loading.watched(shard, iter(loader()), True):
        for name in gathers:
            loading.gathers(name)
    loading.conclude()
    assert found() == expected


def test_accumulation_that_does_not_divide_a_pass_is_noted(observed: Observed, found: Found) -> None:
    observed.accumulates, observed.accelerators[0].gradient_accumulation_steps = True, 2
    loading = Loading(observed)
    shard = prepare_data_loader(loader(20), torch.device("cpu"), num_processes=2, process_index=0)
    for _ in loading.watched(shard, iter(loader()), True):
        observed.backwards += 1
        observed.steps_of[0] = observed.backwards
    loading.conclude()
    assert found() == {"short-accumulation": "note"}
