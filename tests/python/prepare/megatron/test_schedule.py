"""The schedule of Megatron-LM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.megatron import MegatronLMPlugin
from accelerate_cpp.prepare.megatron.schedule import MegatronSchedule

# (lr_decay_style, weight_decay_incr_style, samples of warm-up, min_lr): the rate and the weight decay of steps of 8
# samples, as OptimizerParamScheduler of megatron-core 0.16.1 computes them over 80 samples from .5 and .02 to .1.
OF_MEGATRON: dict[tuple[str, str, int, float], list[tuple[float, float]]] = {
    ("linear", "constant", 16, 0.0): [
        *((0.0, 0.1), (0.25, 0.1), (0.5, 0.1), (0.4375, 0.1), (0.375, 0.1), (0.3125, 0.1), (0.25, 0.1), (0.1875, 0.1)),
        *((0.125, 0.1), (0.0625, 0.1), (0.0, 0.1), (0.0, 0.1)),
    ],
    ("cosine", "linear", 16, 0.01): [
        *((0.0, 0.02), (0.25, 0.028), (0.5, 0.036), (0.481350485, 0.044), (0.428241161, 0.052), (0.348757441, 0.06)),
        *((0.255, 0.068), (0.161242559, 0.076), (0.081758839, 0.084), (0.028649515, 0.092), (0.01, 0.1), (0.01, 0.1)),
    ],
    ("inverse-square-root", "cosine", 16, 0.05): [
        *((0.0, 0.02), (0.25, 0.021957739), (0.5, 0.02763932), (0.40824829, 0.03648859), (0.353553391, 0.04763932)),
        *((0.316227766, 0.06), (0.288675135, 0.07236068), (0.267261242, 0.08351141), (0.25, 0.09236068)),
        *((0.23570226, 0.098042261), (0.223606798, 0.1), (0.05, 0.1)),
    ],
    ("constant", "constant", 0, 0.0): [(0.5, 0.1)] * 12,
    ("linear", "constant", 0, 0.02): [
        *((0.5, 0.1), (0.452, 0.1), (0.404, 0.1), (0.356, 0.1), (0.308, 0.1), (0.26, 0.1), (0.212, 0.1), (0.164, 0.1)),
        *((0.116, 0.1), (0.068, 0.1), (0.02, 0.1), (0.02, 0.1)),
    ],
    ("cosine", "constant", 10, 0.0): [
        *((0.0, 0.1), (0.4, 0.1), (0.490990715, 0.1), (0.452254249, 0.1), (0.387724245, 0.1), (0.305630233, 0.1)),
        *((0.216441684, 0.1), (0.131532834, 0.1), (0.061732133, 0.1), (0.015941282, 0.1), (0.0, 0.1), (0.0, 0.1)),
    ],
}


def sgd() -> torch.optim.Optimizer:
    group = {"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.1}
    return torch.optim.SGD([group, {"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.25}], lr=0.5)


def plugin(**options: Any) -> MegatronLMPlugin:
    return MegatronLMPlugin(**{"train_samples": 80, **options})


@pytest.mark.parametrize("case", OF_MEGATRON, ids=str)
def test_rates_and_weight_decay_are_those_of_megatron(case: tuple[str, str, int, float]) -> None:
    style, increase, warmup, lowest = case
    optimizer = sgd()
    schedule = MegatronSchedule(
        optimizer,
        plugin(
            lr_decay_style=style,
            weight_decay_incr_style=increase,
            lr_warmup_samples=warmup,
            min_lr=lowest,
            start_weight_decay=0.02,
            end_weight_decay=0.1,
        ),
        8,
    )
    for rate, decay in OF_MEGATRON[case]:
        first, second = optimizer.param_groups
        assert (first["lr"], first["weight_decay"]) == pytest.approx((rate, decay), abs=1e-8)
        assert second["weight_decay"] == 0
        if lowest == 0:
            assert second["lr"] == pytest.approx(rate / 2, abs=1e-8)
        schedule.step()
    assert schedule.get_last_lr() == schedule.get_lr() == [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    "options",
    [
        {"train_samples": None, "train_iters": 10, "lr_warmup_iters": 2},
        {"lr_warmup_fraction": 0.2},
        {"lr_decay_samples": 80, "train_samples": 160, "lr_warmup_samples": 16},
        {"lr_decay_iters": 10, "train_samples": 160, "lr_warmup_iters": 2},
    ],
    ids=str,
)
def test_lengths_are_steps_samples_or_fractions(options: dict[str, Any]) -> None:
    optimizer = sgd()
    schedule = MegatronSchedule(optimizer, plugin(**options), 8)
    for rate, _ in OF_MEGATRON["linear", "constant", 16, 0.0]:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        schedule.step()


def test_a_schedule_goes_on_from_its_state() -> None:
    first, second = sgd(), sgd()
    schedule, other = (MegatronSchedule(one, plugin(lr_warmup_samples=16), 8) for one in (first, second))
    for _ in range(5):
        schedule.step()
    other.load_state_dict(schedule.state_dict())
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] == pytest.approx(0.3125)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_decay_style": "steps"}, "lr_decay_style='steps'; expected one of constant, linear"),
        ({"weight_decay_incr_style": "up"}, "weight_decay_incr_style='up'; expected one of constant, linear, cosine"),
        ({"train_samples": None}, "a schedule needs its length; pass train_iters or train_samples"),
        ({"lr_warmup_samples": 80}, "the warm-up takes 80 samples, but rates decay over 80"),
        ({"train_iters": 3}, "train_iters=3 and train_samples=80; pass one of them"),
        ({"weight_decay_incr_style": "linear"}, "'linear' needs start_weight_decay and end_weight_decay"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        MegatronSchedule(sgd(), plugin(**options), 8)


def test_weight_decay_rises_from_nothing() -> None:
    optimizer = sgd()
    schedule = MegatronSchedule(
        optimizer, plugin(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.1), 8
    )
    assert optimizer.param_groups[0]["weight_decay"] == 0
    for _ in range(10):
        schedule.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [pytest.approx(0.1), 0]
