"""The object that wraps a torch loader and passes for it."""

from __future__ import annotations

import copy
import pickle

import pytest
from torch.utils.data import DataLoader

from accelerate_cpp.data.adapter import DataLoaderAdapter
from accelerate_cpp.errors import InvalidArgument


def test_it_passes_for_a_torch_loader_and_reaches_its_attributes():
    adapter = DataLoaderAdapter(range(4), batch_size=2)
    assert isinstance(adapter, DataLoader)
    assert adapter.__class__ is DataLoader
    assert type(adapter) is DataLoaderAdapter
    assert (adapter.num_workers, adapter.batch_size, len(adapter)) == (0, 2, 2)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        adapter.no_such_attribute  # noqa: B018


@pytest.mark.parametrize("duplicate", [copy.copy, lambda adapter: pickle.loads(pickle.dumps(adapter))])
def test_a_copy_keeps_its_type_and_state(duplicate):
    adapter = DataLoaderAdapter(range(4), batch_size=2)
    adapter.iteration = 3
    other = duplicate(adapter)
    assert type(other) is DataLoaderAdapter
    assert other.iteration == 3
    assert len(other) == 2


def test_only_a_stateful_loader_has_a_state():
    plain = DataLoaderAdapter(range(4), batch_size=2)
    with pytest.raises(InvalidArgument, match=r"state_dict .* without use_stateful_dataloader=True"):
        plain.state_dict()
    with pytest.raises(InvalidArgument, match=r"load_state_dict .* without use_stateful_dataloader=True"):
        plain.load_state_dict({})


def test_a_state_is_what_another_loader_takes():
    adapter, other = (DataLoaderAdapter(range(4), use_stateful_dataloader=True, batch_size=2) for _ in range(2))
    adapter.iteration = 3
    other.load_state_dict(adapter.state_dict())
    assert other.iteration == 3
    with pytest.raises(InvalidArgument, match="batches, epoch, position, samples, seed, world is missing"):
        other.load_state_dict({"_num_yielded": 3})


def test_an_epoch_reaches_sampler_and_dataset():
    class Listener(list):
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

    sampler, dataset = Listener(range(4)), Listener(range(4))
    adapter = DataLoaderAdapter(dataset, batch_size=2, sampler=sampler)
    adapter.set_epoch(5)
    assert (sampler.epoch, dataset.epoch, adapter.iteration) == (5, 5, 5)


def test_a_step_of_one_process_has_the_samples_of_a_batch() -> None:
    assert DataLoaderAdapter(range(4), batch_size=2).total_batch_size == 2
    assert DataLoaderAdapter(range(4), batch_sampler=[[0], [1, 2, 3]]).total_batch_size is None


def test_a_subclass_can_change_the_state_before_it_is_returned():
    class Behind(DataLoaderAdapter):
        def adjust_state_dict_for_prefetch(self):
            self.dl_state_dict["position"] -= 1

    states = []
    for kind in (DataLoaderAdapter, Behind):
        adapter = kind(range(4), use_stateful_dataloader=True, batch_size=2)
        adapter.progress.in_pass, adapter.progress.steps = True, 2
        states.append(adapter.state_dict())
        assert states[-1] is adapter.dl_state_dict
    assert [state["position"] for state in states] == [2, 1]
