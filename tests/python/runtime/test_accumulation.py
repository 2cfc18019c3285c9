"""The position of a run between two optimizer steps."""

from __future__ import annotations

import copy

import pytest

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


def test_a_copy_of_what_has_it_has_the_same() -> None:
    accumulation = Accumulation()
    assert copy.deepcopy({"of": accumulation})["of"] is accumulation
