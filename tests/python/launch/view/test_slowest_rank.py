from __future__ import annotations

from collections.abc import Sequence

import pytest

from accelerate_cpp.launch.view.slowest_rank import Straggler, knows_waits, stragglers
from accelerate_cpp.runtime.progress_board import Standing


def team(*own: Sequence[float], step: float = 0.2) -> list[Standing]:
    """Ranks whose steps all take as long, of which each has its ``own`` part and waits in the rest."""
    return [
        Standing(
            rank,
            steps=len(times) + 1,
            step_seconds=[step] * len(times),
            waited_seconds=[step - time for time in times],
            has_waited=True,
        )
        for rank, times in enumerate(own)
    ]


def test_rank_that_the_others_wait_for_is_named_with_the_time_that_it_takes_more() -> None:
    [found] = stragglers(team([0.03] * 10, [0.08] * 10, [0.03] * 10))
    assert (found.rank, found.seconds) == (1, pytest.approx(0.05))
    assert found.sentence() == "rank 1 is slower than the others by 50 ms a step"


def test_it_is_named_once_most_of_the_last_ten_steps_are_slow() -> None:
    for slow in range(11):
        named = stragglers(team([0.03] * 10, [0.03] * (10 - slow) + [0.08] * slow))
        assert [straggler.rank for straggler in named] == ([1] if slow > 5 else [])


def test_single_long_step_is_no_reason() -> None:
    assert stragglers(team([0.03] * 9 + [9.0], [0.03] * 10, step=10.0)) == []


@pytest.mark.parametrize(("seconds", "is_named"), [(0.049, False), (0.051, True)])
def test_short_steps_may_differ_by_twenty_milliseconds(seconds: float, is_named: bool) -> None:
    assert bool(stragglers(team([0.03] * 5, [seconds] * 5))) is is_named


@pytest.mark.parametrize(("seconds", "is_named"), [(1.09, False), (1.11, True)])
def test_long_steps_may_differ_by_a_tenth(seconds: float, is_named: bool) -> None:
    assert bool(stragglers(team([1.0] * 5, [seconds] * 5, step=2.0))) is is_named


def test_several_slow_ranks_are_named_the_slowest_first() -> None:
    own = [[0.03] * 5, [0.08] * 5, [0.03] * 5, [0.13] * 5, [0.03] * 5]
    assert [straggler.rank for straggler in stragglers(team(*own))] == [3, 1]


def test_few_steps_a_lone_rank_and_unmeasured_waits_say_nothing() -> None:
    assert stragglers(team([0.03] * 2, [0.08] * 2)) == []
    assert stragglers(team([0.03] * 10, [0.08] * 2)) == []
    assert stragglers(team([0.03] * 10)) == []
    assert stragglers([]) == []
    unmeasured = [
        Standing(rank, 11, step_seconds=[seconds] * 10, waited_seconds=[0.0] * 10)
        for rank, seconds in enumerate((0.03, 0.08))
    ]
    assert not knows_waits(unmeasured)
    assert stragglers(unmeasured) == []


def test_sentence_is_in_milliseconds() -> None:
    assert "by 1500 ms a step" in Straggler(3, 1.5).sentence()
