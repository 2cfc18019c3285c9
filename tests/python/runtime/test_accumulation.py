"""Where a run stands between two optimizer steps."""

from __future__ import annotations

import copy
import math

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime.accumulation import Accumulation


class Loader:
    """As much of a prepared loader as accumulation looks at."""

    def __init__(self, end_of_dataloader: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end_of_dataloader
        self.remainder = remainder


def test_gradients_are_synchronised_every_nth_micro_batch() -> None:
    accumulation = Accumulation(num_steps=3)
    assert [accumulation.advance() for _ in range(7)] == [False, False, True, False, False, True, False]


def test_the_last_batch_synchronises_and_the_count_starts_over() -> None:
    accumulation, loader = Accumulation(num_steps=4), Loader()
    accumulation.reading.push_loader(loader)
    assert [accumulation.advance() for _ in range(2)] == [False, False]
    loader.end_of_dataloader = True
    assert accumulation.advance()
    assert accumulation.step == 0


def test_the_last_batch_does_not_synchronise_when_told_so() -> None:
    accumulation, loader = Accumulation(num_steps=4, sync_with_dataloader=False), Loader(end_of_dataloader=True)
    accumulation.reading.push_loader(loader)
    assert not accumulation.advance()
    assert accumulation.step == 1


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_one_step_in_every_num_steps_synchronises(num_steps: int) -> None:
    accumulation = Accumulation(num_steps=num_steps)
    assert sum(accumulation.advance() for _ in range(10 * num_steps)) == 10


def _weigh(accumulation: Accumulation, weight: float | None, cleared: bool = True) -> float | None:
    return accumulation.weigh(weight, cleared=lambda: cleared)


def test_the_pass_that_completes_a_step_gets_the_sum_of_its_weights() -> None:
    accumulation = Accumulation(num_steps=2)
    for weights in ((3.0, 4.0), (1.0, 1.0)):
        found = []
        for weight in weights:
            accumulation.advance()
            found.append(_weigh(accumulation, weight))
        assert found == [None, sum(weights)]


def test_without_weights_there_is_nothing_to_sum() -> None:
    accumulation = Accumulation()
    assert [_weigh(accumulation, None, cleared=False) for _ in range(3)] == [None] * 3


def test_passes_with_and_without_a_weight_do_not_mix_within_a_step() -> None:
    accumulation = Accumulation(num_steps=2)
    accumulation.advance()
    _weigh(accumulation, 3.0)
    accumulation.advance()
    with pytest.raises(InvalidArgument, match="some have none"):
        _weigh(accumulation, None)


def test_gradients_that_were_divided_take_no_more_until_the_step_ends() -> None:
    accumulation = Accumulation()
    assert _weigh(accumulation, 3.0) == 3.0
    with pytest.raises(InvalidArgument, match="a second backward pass"):
        _weigh(accumulation, 3.0, cleared=False)
    assert _weigh(accumulation, 4.0, cleared=True) == 4.0
    accumulation.end_step()
    assert _weigh(accumulation, None, cleared=False) is None


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(InvalidArgument, match="expected a finite number"):
        _weigh(Accumulation(), weight)


def test_a_copy_of_what_has_it_has_the_same() -> None:
    accumulation = Accumulation()
    assert copy.deepcopy({"of": accumulation})["of"] is accumulation
