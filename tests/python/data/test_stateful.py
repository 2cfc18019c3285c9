"""torchdata's loader, and its states, as far as they are taken apart here."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate_cpp.data import stateful
from accelerate_cpp.data.stateful import Recorded
from accelerate_cpp.errors import InvalidArgument

torchdata = pytest.importorskip("torchdata.stateful_dataloader")


class Stream(IterableDataset):
    """Ten numbers, and the place of the next one."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while self.next < 10:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def read(loader, batches):
    """The state of ``loader`` after so many batches."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


def test_torchdata_is_used_if_asked_for_and_installed(monkeypatch):
    assert type(stateful.make(True, range(4), in_order=True)) is torchdata.StatefulDataLoader
    assert type(stateful.make(False, range(4))) is DataLoader
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    assert type(stateful.make(True, range(4))) is DataLoader


def test_an_older_torchdata_is_not_told_of_in_order(monkeypatch):
    class Older(DataLoader):
        def __init__(self, dataset, batch_size=1):
            super().__init__(dataset, batch_size)

    monkeypatch.setattr(torchdata, "StatefulDataLoader", Older)
    assert type(stateful.make(True, range(4), in_order=True, batch_size=2)) is Older


def test_a_loader_like_another_is_of_its_class():
    for asked in (False, True):
        loader = stateful.make(asked, range(4))
        assert type(stateful.like(loader, range(3), batch_size=2)) is type(loader)
        assert stateful.is_torchdata(loader) is asked


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("read_before", [0, 1, 3])
def test_a_state_tells_its_batches(workers, read_before):
    loader = stateful.make(True, range(8), batch_size=2, num_workers=workers)
    state = read(loader, read_before)
    assert stateful.is_state(state)
    assert not stateful.is_finished(state)
    assert stateful.batches_in(state) == read_before
    assert not stateful.is_state({"epoch": 0})


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_is_for_as_many_workers(workers):
    state = stateful.make(True, range(8), num_workers=workers).state_dict()
    stateful.check(state, stateful.make(True, range(8), num_workers=workers))
    with pytest.raises(InvalidArgument, match=f"num_workers={workers}, and this one has num_workers=1"):
        stateful.check(state, stateful.make(True, range(8), num_workers=1))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_only_torchdata_restores_is_told(workers):
    plain = read(stateful.make(True, range(8), num_workers=workers), 1)
    assert not stateful.holds_dataset(plain)
    stateful.check_needs_no_torchdata(plain)
    with_dataset = read(stateful.make(True, Stream(), num_workers=workers), 1)
    assert stateful.holds_dataset(with_dataset)
    with pytest.raises(InvalidArgument, match="pip install torchdata"):
        stateful.check_needs_no_torchdata(with_dataset)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_of_the_start_costs_no_random_numbers(workers):
    generator = torch.Generator().manual_seed(1)
    loader = stateful.make(True, range(8), shuffle=True, generator=generator, num_workers=workers)
    before = torch.get_rng_state(), generator.get_state()
    state = stateful.initial_state(loader, {generator})
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(generator.get_state(), before[1])
    assert stateful.batches_in(state) == 0


def test_what_was_to_be_restored_can_be_forgotten():
    loader = stateful.make(True, range(4), batch_size=2)
    state = read(loader, 1)
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[2, 3]]
    loader.load_state_dict(state)
    stateful.forget(loader)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ahead", [1, 3])
def test_states_of_batches_that_are_out_are_those_before_what_was_read_ahead(workers, ahead):
    batches = Recorded(iter(stateful.make(True, range(8), num_workers=workers)), 0, 0)
    for _ in range(2 + ahead):
        next(batches)
    fresh = stateful.make(True, range(8), num_workers=workers)
    fresh.load_state_dict(batches.after(2, is_last=False))
    assert [batch.item() for batch in fresh] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_the_loader_does_not_know_of_are_added(workers):
    indices = [[index] for index in range(8)]
    rest = stateful.make(True, range(8), batch_sampler=indices[3:], num_workers=workers)
    batches = Recorded(iter(rest), 3, 3)
    for _ in range(3):
        next(batches)
    state = batches.after(5, is_last=False)
    fresh = stateful.make(True, range(8), batch_sampler=indices, num_workers=workers)
    fresh.load_state_dict(state)
    assert [batch.item() for batch in fresh] == [5, 6, 7]
    with pytest.raises(InvalidArgument, match="lacks the state of its batch sampler"):
        stateful.check(state, stateful.make(True, range(8), num_workers=workers))


def test_after_the_last_batch_the_state_is_finished():
    batches = Recorded(iter(stateful.make(True, range(2))), 0, 0)
    assert len(list(batches)) == 2
    state = batches.after(2, is_last=True)
    assert stateful.is_finished(state)
    fresh = stateful.make(True, range(2))
    fresh.load_state_dict(state)
    assert len(list(fresh)) == 2


def test_a_copy_has_no_part_in_the_pass():
    assert pickle.loads(pickle.dumps(Recorded(iter(stateful.make(True, range(2))), 0, 0))) is None
