from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.prepare.unprepared import warn_of_unprepared
from accelerate_cpp.runtime.reading import Reading

MODEL = torch.nn.Linear(2, 1)


def bundle(model: torch.nn.Module | None = MODEL, stepped: torch.nn.Module = MODEL) -> Bundle:
    made = Bundle()
    made.models = [] if model is None else [model]
    made.optimizers = [torch.optim.SGD(stepped.parameters(), lr=0.1)]
    return made


def told(prepared: Bundle, reading: Reading | None = None, processes: int = 2) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_unprepared(prepared, reading or Reading(), SingleStrategy(), processes)
    return [str(one.message) for one in caught]


def test_what_was_prepared_is_not_warned_of() -> None:
    assert told(bundle()) == []


def test_one_process_has_nobody_to_differ_from() -> None:
    iterator = iter(DataLoader([1, 2]))
    assert told(bundle(model=None), processes=1) == []
    del iterator


def test_model_that_was_never_prepared_is_named_with_the_place() -> None:
    [sentence] = told(bundle(model=None))
    assert "test_unprepared.py:" in sentence
    assert "no model has been prepared" in sentence
    assert "each of the 2 processes trains a model of its own" in sentence


def test_parameters_of_another_model_are_counted() -> None:
    both = torch.nn.ModuleList([MODEL, torch.nn.Linear(3, 1)])
    [sentence] = told(bundle(stepped=both))
    assert "2 of the 4 parameters of prepared optimizers belong to no prepared model" in sentence
    both[1].requires_grad_(False)
    assert told(bundle(stepped=both)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_that_is_read_although_none_was_prepared_is_warned_of(workers: int) -> None:
    for _ in DataLoader([1, 2], num_workers=workers):
        [sentence] = told(bundle())
    assert "the DataLoader that is read has not been prepared: each of the 2 processes trains on all" in sentence
    assert told(bundle()) == []  # its iterator is gone


def test_loader_beside_a_prepared_one_is_left_alone() -> None:
    reading = Reading()
    reading.push_loader(reading)
    for _ in DataLoader([1, 2]):
        assert told(bundle(), reading) == []


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_loader_that_may_divide_its_data_itself_is_left_alone() -> None:
    data = [1, 2]
    sampled = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))  # type: ignore[arg-type]
    batched = DataLoader(data, batch_sampler=[[0], [1]])
    for loader in (sampled, batched, DataLoader(Stream())):
        for _ in loader:
            assert told(bundle()) == []
