"""Schedules and the runs that they are made for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from accelerate_cpp.check.observed import Observed, Pass
from accelerate_cpp.check.schedules import Schedules, total_steps

Found = Callable[[], dict[str, str]]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def warmed_up(step: int, *, num_training_steps: int) -> float:
    return min(1.0, step / num_training_steps)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9), 9),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=8), 8),
        (lambda o: lr_scheduler.PolynomialLR(o, total_iters=7), 7),
        (lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=6), 6),
        (lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, total_iters=6), None),
        (lambda o: lr_scheduler.LambdaLR(o, partial(warmed_up, num_training_steps=5)), 5),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), None),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.9), None),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[2]
            ),
            10,
        ),
    ],
)
def test_a_schedule_says_how_long_it_is(make: Callable[[Any], Any], expected: int | None) -> None:
    assert total_steps(make(optimizer())) == expected


@pytest.mark.parametrize(
    ("total", "epochs", "expected"),
    [
        (30, 3, {}),
        (15, 3, {"schedule-ends-early": "warning"}),
        (60, 3, {"schedule-too-long": "warning"}),
        (9, None, {}),
        (5, None, {"schedule-ends-early": "warning"}),
        (1000, None, {}),
    ],
)
def test_it_is_compared_with_the_run(
    observed: Observed, found: Found, total: int, epochs: int | None, expected: dict[str, str]
) -> None:
    observed.accelerators.clear()
    schedules, loader = Schedules(observed), DataLoader(torch.arange(20), batch_size=2)
    reading = Pass(loader, False, "train.py:1", epochs, 0, 0, batches=2, steps=2, backwards=2)
    observed.passes.append(reading)
    observed.reading.append(reading)
    scheduler = lr_scheduler.PolynomialLR(optimizer(), total_iters=total)
    for _ in range(2):
        schedules.step(scheduler, by_prepared=False)
    schedules.conclude()
    assert found() == expected


def test_a_scheduler_that_is_not_prepared_is_a_warning_unless_registered(observed: Observed, found: Found) -> None:
    registered, forgotten = (lr_scheduler.ExponentialLR(optimizer(), 0.9) for _ in range(2))
    observed.accelerators[0] = SimpleNamespace(**vars(observed.accelerators[0]) | {"_custom_objects": [registered]})
    schedules = Schedules(observed)
    schedules.step(registered, by_prepared=False)
    assert found() == {}
    schedules.step(forgotten, by_prepared=False)
    assert found() == {"unprepared-scheduler": "warning"}
