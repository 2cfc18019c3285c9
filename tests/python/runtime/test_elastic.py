"""What a run keeps that goes on with another number of processes, against the numbers of the full run."""

from __future__ import annotations

import math

import pytest
import torch

from accelerate_cpp import scheduler
from accelerate_cpp.config import env_table
from accelerate_cpp.optimizer import AcceleratedOptimizer
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.accumulation import Accumulation
from accelerate_cpp.runtime.elastic import RULES, Elastic
from accelerate_cpp.scheduler import AcceleratedScheduler


@pytest.mark.parametrize(
    ("full", "present", "steps", "expected", "share"),
    [
        (4, 2, 1, 2, 1.0),
        (4, 1, 1, 4, 1.0),
        (4, 3, 1, 1, 3 / 4),
        (3, 2, 1, 2, 4 / 3),
        (4, 3, 3, 4, 1.0),
        (8, 5, 3, 5, 25 / 24),
        (2, 3, 1, 1, 3 / 2),
        (2, 4, 4, 2, 1.0),
        (2, 64, 1, 1, 32.0),
    ],
)
def test_samples_of_a_step_stay_as_near_as_micro_batches_allow(full, present, steps, expected, share):
    elastic = Elastic(full, present)
    assert elastic.micro_batches(steps) == expected
    assert elastic.share(steps, expected) == pytest.approx(share)
    assert all(abs(share - 1) <= abs(elastic.share(steps, other) - 1) + 1e-12 for other in range(1, 8 * steps))


def test_rules_of_the_learning_rate():
    assert tuple(RULES) == env_table.ELASTIC_RULES
    rates = {rule: Elastic(4, 3, rule).rate_factor(1, 1) for rule in RULES}
    assert rates == {"linear": 0.75, "sqrt": math.sqrt(0.75), "none": 1.0}


@pytest.fixture
def accumulation(monkeypatch):
    """The accumulation of a run of 4 processes of which 2 are left."""
    monkeypatch.setattr(current, "accumulation", Accumulation())
    current.accumulation.elastic = Elastic(4, 2)
    return current.accumulation


def test_steps_are_adjusted_where_accumulate_counts_them(accumulation):
    assert (accumulation.num_steps, accumulation.rate_factor) == (1, 0.5)
    assert [accumulation.advance() for _ in range(4)] == [False, True, False, True]
    assert (accumulation.num_steps, accumulation.rate_factor) == (2, 1.0)
    accumulation.num_steps = 3
    assert accumulation.num_steps == 6


def test_a_step_has_its_rate_and_schedules_see_their_own(accumulation):
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    inner = torch.optim.SGD([{"params": [weight], "lr": 0.5}])
    optimizer = AcceleratedOptimizer(inner)
    schedule = AcceleratedScheduler(torch.optim.lr_scheduler.StepLR(inner, 1, 0.5), optimizer)
    optimizer.step()
    assert weight.item() == -0.25
    assert inner.param_groups[0]["lr"] == 0.5
    schedule.step()
    assert schedule.get_last_lr() == [0.25]


def test_rates_are_restored_when_a_step_raises(accumulation):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError(self.param_groups[0]["lr"])

    inner = Fails([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="0\\.5"):
        AcceleratedOptimizer(inner).step()
    assert inner.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(
    ("full", "present", "steps", "expected"), [(4, 2, 1, 4), (4, 3, 1, 3), (4, 2, 2, 4), (4, 4, 1, 4), (4, 1, 4, 4)]
)
def test_schedules_advance_with_the_samples(accumulation, full, present, steps, expected):
    accumulation.elastic, accumulation.num_steps = Elastic(full, present), steps
    accumulation.advance()
    assert accumulation.schedule_advance(present) == expected


@pytest.mark.parametrize(("full", "present", "steps", "samples"), [(4, 3, 2, 4.5), (3, 2, 3, 10 / 3), (4, 2, 1, 4)])
def test_schedules_advance_with_the_samples_also_by_parts_of_steps(
    accumulation, monkeypatch, full, present, steps, samples
):
    """In proportion to the samples: a full run advances by ``full`` for each step."""
    monkeypatch.setattr(scheduler, "data_size", lambda: present)
    accumulation.elastic, accumulation.num_steps = Elastic(full, present), steps
    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    lengths = torch.optim.lr_scheduler.LambdaLR(inner, lambda count: count)
    prepared = AcceleratedScheduler(lengths, AcceleratedOptimizer(inner))
    for step in range(1, 21):
        while not accumulation.advance():
            prepared.step()
        prepared.step()
        assert 0 <= step * samples - lengths.last_epoch < 1
