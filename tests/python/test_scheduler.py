"""The scheduler wrapper."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
from accelerate.scheduler import AcceleratedScheduler as OriginalScheduler
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from accelerate_cpp import scheduler as module
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.accumulation import Accumulation
from accelerate_cpp.scheduler import AcceleratedScheduler


@pytest.fixture(autouse=True)
def accumulation(monkeypatch):
    """A fresh state of accumulation for each test."""
    monkeypatch.setattr(current, "accumulation", Accumulation())
    return current.accumulation


@pytest.fixture
def optimizer():
    """A prepared optimizer that has stepped once, so that schedulers may."""
    prepared = AcceleratedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    return prepared


def halving(optimizer, **options):
    schedule = StepLR(optimizer.optimizer, 1, 0.5)
    optimizer.step()
    return AcceleratedScheduler(schedule, optimizer, **options)


def test_the_signature_is_the_originals():
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(AcceleratedScheduler.__init__) == shape(OriginalScheduler.__init__)


def test_one_process_steps_once(optimizer):
    schedule = halving(optimizer)
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def test_a_scheduler_that_can_print_its_rates_still_can(optimizer, capsys):
    class Printing(StepLR):
        def print_lr(self, is_verbose, group, *, epoch):
            print(is_verbose, group, epoch)

    AcceleratedScheduler(Printing(optimizer.optimizer, 1), optimizer).print_lr(True, 0, epoch=2)
    assert capsys.readouterr().out == "True 0 2\n"


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 0.125), ({"split_batches": True}, 0.5), ({"step_with_optimizer": False}, 0.5)]
)
def test_a_step_counts_as_many_as_there_are_processes(monkeypatch, optimizer, options, expected):
    monkeypatch.setattr(module, "data_size", lambda: 3)
    schedule = halving(optimizer, **options)
    schedule.step()
    assert schedule.get_last_lr() == [expected]


@pytest.mark.parametrize("adjust", [False, True])
def test_the_schedule_stands_still_while_gradients_accumulate(accumulation, optimizer, adjust):
    accumulation.sync_gradients = False
    accumulation.adjust_scheduler = adjust
    schedule = AcceleratedScheduler(StepLR(optimizer.optimizer, 1, 0.5), optimizer)
    count = schedule.scheduler._step_count
    schedule.step()
    assert schedule.get_last_lr() == [1.0]
    assert schedule.scheduler._step_count == count + adjust


def test_a_skipped_optimizer_step_is_a_skipped_schedule_step(optimizer):
    schedule = halving(optimizer)
    optimizer._is_overflow = True
    schedule.step()
    assert schedule.get_last_lr() == [1.0]


def test_a_schedule_with_an_end_is_not_driven_beyond_it(monkeypatch, optimizer):
    monkeypatch.setattr(module, "data_size", lambda: 2)
    inner = OneCycleLR(optimizer.optimizer, max_lr=1.0, total_steps=5)
    optimizer.step()
    schedule = AcceleratedScheduler(inner, [optimizer])
    for _ in range(4):
        schedule.step()
    assert inner.last_epoch == 5


def test_everything_else_is_the_wrapped_schedulers(optimizer):
    schedule = halving(optimizer)
    assert schedule.step_size == 1
    assert schedule.state_dict() == schedule.scheduler.state_dict()
    schedule.load_state_dict({**schedule.state_dict(), "gamma": 0.1})
    assert schedule.scheduler.gamma == 0.1
    assert schedule.optimizers == [optimizer]


def test_attributes_of_the_wrapped_scheduler_are_read_and_set_through_the_wrapper(optimizer):
    schedule = halving(optimizer)
    schedule.gamma = 0.1
    schedule.last_epoch = 7
    schedule.mine = "wrapper's"
    inner = schedule.scheduler
    assert (inner.gamma, inner.last_epoch, schedule.base_lrs, schedule.step_size) == (0.1, 7, [1.0], 1)
    assert not hasattr(inner, "mine")
    with pytest.raises(AttributeError, match="nowhere"):
        _ = schedule.nowhere


def test_a_saved_state_is_restored(optimizer):
    schedule = halving(optimizer)
    saved = schedule.state_dict()
    schedule.step()
    schedule.load_state_dict(saved)
    assert schedule.last_epoch == 0
    with pytest.warns(UserWarning, match="get_last_lr"):  # torch's own, which only calls to the real method give
        schedule.get_lr()


def test_a_scheduler_is_pickled_with_what_it_wraps(optimizer):
    schedule = halving(optimizer)
    schedule.step()
    copied = pickle.loads(pickle.dumps(schedule))
    assert copied.get_last_lr() == [0.5]
    copied.step()
    assert (copied.get_last_lr(), schedule.get_last_lr()) == ([0.25], [0.5])


def test_the_state_of_accumulation_is_at_hand(optimizer, accumulation):
    accumulation.sync_gradients = False
    assert halving(optimizer).gradient_state.sync_gradients is False
