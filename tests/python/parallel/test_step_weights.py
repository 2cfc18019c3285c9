"""Weights of backward passes, for each model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.step_weights import StepWeights


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [self.weight]}]


@pytest.fixture
def nets() -> tuple[Net, Net]:
    return Net(), Net()


def trained(nets: tuple[Net, Net]) -> SingleStrategy:
    strategy = SingleStrategy()
    strategy.prepare(Bundle(models=list(nets)))
    return strategy


def run(
    weights: StepWeights, nets: tuple[Net, Net], weight: float | None, through: list[Net], completes: bool = True
) -> dict[int, float] | None:
    """One pass of a loss that depends on ``through``; what each of the nets weighs after it, by number."""
    with weights.of_pass(trained(nets), weight, completes) as found:
        sum(net(torch.ones(1, 1)) for net in through).backward()  # type: ignore[union-attr]
    if found is None:
        return None
    assert found.touched == set(through)
    return {number: found.totals[net] for number, net in enumerate(nets) if net in found.totals}


def test_each_model_has_the_sum_of_the_passes_that_touched_it(nets: tuple[Net, Net]) -> None:
    weights = StepWeights()
    one, two = nets
    assert run(weights, nets, 3.0, [one], completes=False) == {}
    assert run(weights, nets, 5.0, [two], completes=False) == {}
    assert run(weights, nets, 7.0, [one, two], completes=False) == {}
    assert run(weights, nets, 1.0, [one]) == {0: 11.0, 1: 13.0}
    assert run(weights, nets, 2.0, [two])[1] == 14.0  # type: ignore[index]
    for net in nets:
        weights.end_step(net.groups)
    assert run(weights, nets, 4.0, [one, two]) == {0: 4.0, 1: 4.0}


def test_without_weights_there_is_nothing_to_know(nets: tuple[Net, Net]) -> None:
    weights = StepWeights()
    assert [run(weights, nets, None, list(nets)) for _ in range(3)] == [None] * 3


@pytest.mark.parametrize("order", [(3.0, None), (None, 3.0)])
def test_passes_with_and_without_a_weight_do_not_mix_within_a_step_of_a_model(
    nets: tuple[Net, Net], order: tuple[float | None, float | None]
) -> None:
    weights = StepWeights()
    run(weights, nets, order[0], [nets[0]], completes=False)
    run(weights, nets, order[1], [nets[1]], completes=False)
    with pytest.raises(InvalidArgument, match="of Net have a weight and some have none"):
        run(weights, nets, order[1], [nets[0]])


def test_passes_do_not_mix_within_a_step_of_a_model_while_another_is_in_a_step_of_its_own(
    nets: tuple[Net, Net],
) -> None:
    weights = StepWeights()
    one, two = nets
    run(weights, nets, 3.0, [one], completes=False)
    run(weights, nets, 3.0, [two], completes=False)
    weights.end_step(two.groups)
    run(weights, nets, None, [two], completes=False)
    with pytest.raises(InvalidArgument, match="of Net have a weight and some have none"):
        run(weights, nets, 3.0, [two])


def test_gradients_that_a_step_did_not_clear_may_take_weights_in_the_next(nets: tuple[Net, Net]) -> None:
    weights = StepWeights()
    run(weights, nets, 3.0, list(nets))
    for net in nets:
        weights.end_step(net.groups)
    run(weights, nets, 4.0, [nets[0]], completes=False)
    assert run(weights, nets, 5.0, [nets[1]]) == {0: 9.0, 1: 5.0}


def test_gradients_that_were_divided_take_no_more_until_the_model_steps(nets: tuple[Net, Net]) -> None:
    weights = StepWeights()
    one, two = nets
    run(weights, nets, 3.0, [one])
    run(weights, nets, 3.0, [two])
    weights.end_step(two.groups)
    run(weights, nets, 3.0, [two])
    for weight in (3.0, None):
        with pytest.raises(InvalidArgument, match="a second backward pass through Net"):
            run(weights, nets, weight, [one])
    one.zero_grad()
    assert run(weights, nets, 4.0, [one])[0] == 4.0  # type: ignore[index]


def test_gradients_that_are_gone_weigh_nothing_any_more(nets: tuple[Net, Net]) -> None:
    weights = StepWeights()
    run(weights, nets, 3.0, [nets[0]], completes=False)
    nets[0].zero_grad()
    assert run(weights, nets, 4.0, [nets[0]]) == {0: 4.0, 1: 4.0}


def test_a_step_on_parameters_of_no_model_ends_that_of_all(nets: tuple[Net, Net]) -> None:
    weights = StepWeights()
    run(weights, nets, 3.0, list(nets))
    weights.end_step(Net().groups)
    assert run(weights, nets, 3.0, list(nets)) == {0: 3.0, 1: 3.0}


def test_a_pass_that_raises_weighs_nothing(nets: tuple[Net, Net]) -> None:
    weights = StepWeights()
    with pytest.raises(KeyError), weights.of_pass(trained(nets), 3.0, True):
        raise KeyError
    assert run(weights, nets, 4.0, [nets[0]]) == {0: 4.0, 1: 4.0}


def test_a_loss_that_reaches_a_model_through_reentrant_checkpointing_touches_it(nets: tuple[Net, Net]) -> None:
    weights, inputs = StepWeights(), torch.ones(1, 1, requires_grad=True)
    with weights.of_pass(trained(nets), 3.0, True) as found:
        torch.utils.checkpoint.checkpoint(nets[0], inputs, use_reentrant=True).sum().backward()
    assert found is not None
    assert found.touched == {nets[0]}


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused(nets: tuple[Net, Net], weight: float) -> None:
    with pytest.raises(InvalidArgument, match="expected a finite number"):
        run(StepWeights(), nets, weight, [])
