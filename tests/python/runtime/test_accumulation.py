"""Where a run stands between two optimizer steps."""

from __future__ import annotations

import gc
import math

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime.accumulation import Accumulation


class Loader:
    """As much of a prepared loader as accumulation looks at."""

    def __init__(self, end_of_dataloader: bool = False, remainder: int = -1) -> None:
        self.end_of_dataloader = end_of_dataloader
        self.remainder = remainder


def test_without_a_loader_nothing_ends_and_nothing_is_known() -> None:
    accumulation = Accumulation()
    assert accumulation.active_loader is None
    assert (accumulation.end_of_dataloader, accumulation.remainder, accumulation.sync_gradients) == (False, -1, True)


def test_gradients_are_synchronised_every_nth_micro_batch() -> None:
    accumulation = Accumulation(num_steps=3)
    assert [accumulation.advance() for _ in range(7)] == [False, False, True, False, False, True, False]


def test_the_last_batch_synchronises_and_the_count_starts_over() -> None:
    accumulation, loader = Accumulation(num_steps=4), Loader()
    accumulation.push_loader(loader)
    assert [accumulation.advance() for _ in range(2)] == [False, False]
    loader.end_of_dataloader = True
    assert accumulation.advance()
    assert accumulation.step == 0


def test_the_last_batch_does_not_synchronise_when_told_so() -> None:
    accumulation, loader = Accumulation(num_steps=4, sync_with_dataloader=False), Loader(end_of_dataloader=True)
    accumulation.push_loader(loader)
    assert not accumulation.advance()
    assert accumulation.step == 1


def test_the_innermost_loader_decides_until_it_is_removed() -> None:
    accumulation, outer, inner = Accumulation(), Loader(remainder=3), Loader(end_of_dataloader=True, remainder=1)
    accumulation.push_loader(outer)
    accumulation.push_loader(inner)
    assert (accumulation.active_loader, accumulation.end_of_dataloader, accumulation.remainder) == (inner, True, 1)
    accumulation.remove_loader(inner)
    assert (accumulation.active_loader, accumulation.end_of_dataloader, accumulation.remainder) == (outer, False, 3)


def test_a_loader_that_is_read_twice_stays_active_until_both_reads_end() -> None:
    accumulation, loader = Accumulation(), Loader()
    accumulation.push_loader(loader)
    accumulation.push_loader(loader)
    accumulation.remove_loader(loader)
    assert accumulation.active_loader is loader
    accumulation.remove_loader(loader)
    assert accumulation.active_loader is None


def test_removing_an_unknown_loader_changes_nothing() -> None:
    accumulation, loader = Accumulation(), Loader()
    accumulation.push_loader(loader)
    accumulation.remove_loader(Loader())
    assert accumulation.active_loader is loader


def test_an_abandoned_loader_is_forgotten() -> None:
    accumulation, outer, inner = Accumulation(), Loader(), Loader()
    accumulation.push_loader(outer)
    accumulation.push_loader(inner)
    del inner
    gc.collect()
    assert accumulation.active_loader is outer


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


def test_the_loaders_that_are_being_read_can_be_listed_and_replaced() -> None:
    accumulation, outer, inner = Accumulation(), Loader(), Loader()
    accumulation.push_loader(outer)
    accumulation.push_loader(inner)
    assert accumulation.loaders == [outer, inner]
    accumulation.loaders = [inner, outer]
    assert accumulation.active_loader is outer
    del outer
    gc.collect()
    assert accumulation.loaders == [inner]
