"""What counts as growth: small leaks do, noise and warm-up do not."""

from __future__ import annotations

import random

import pytest

from growth import MEMORY_TOLERANCE, ends, growth

ROUNDS, OPERATIONS, STEPS = 60, 150, 48
DONE = [OPERATIONS * (n + 1) for n in range(ROUNDS)]
STEPS_DONE = [STEPS * (n + 1) for n in range(ROUNDS)]


def test_a_descriptor_in_100_operations_is_growth() -> None:
    assert growth("descriptors", [50 + done // 100 for done in DONE], DONE, STEPS_DONE).grows


def test_one_descriptor_that_stays_is_growth_and_one_that_goes_is_not() -> None:
    late = ROUNDS * 3 // 4
    assert growth("descriptors", [50 + (n >= late) for n in range(ROUNDS)], DONE, STEPS_DONE).grows
    assert not growth("descriptors", [50 + (n % 7 == 0) for n in range(ROUNDS)], DONE, STEPS_DONE).grows


def test_memory_of_4_kib_a_step_is_growth_under_noise() -> None:
    noise = random.Random(1)
    leaked = [300e6 + 4096 * steps + noise.uniform(-1, 1) * MEMORY_TOLERANCE / 4 for steps in STEPS_DONE]
    assert growth("anonymous_bytes", leaked, DONE, STEPS_DONE).grows
    steady = [300e6 + noise.uniform(-1, 1) * MEMORY_TOLERANCE / 2 for _ in STEPS_DONE]
    assert not growth("anonymous_bytes", steady, DONE, STEPS_DONE).grows


def test_what_is_noticed_at_least_is_said() -> None:
    """A leak a little larger than that is growth, and one a little smaller is not."""
    smallest = growth("anonymous_bytes", [0.0] * ROUNDS, DONE, STEPS_DONE).smallest_seen
    assert smallest < 4096
    for factor, grows in ((0.95, False), (1.05, True)):
        leaked = [factor * smallest * steps for steps in STEPS_DONE]
        assert growth("anonymous_bytes", leaked, DONE, STEPS_DONE).grows == grows


def test_warm_up_and_shrinking_are_not_growth() -> None:
    assert not growth("threads", [min(n, 10) for n in range(ROUNDS)], DONE, STEPS_DONE).grows
    assert not growth("threads", [100 - n for n in range(ROUNDS)], DONE, STEPS_DONE).grows


def test_the_ends_of_a_series_are_medians_after_the_warm_up() -> None:
    assert ends([90, 90, 90, 1, 1, 90, 5, 5, 5, 2, 90, 2]) == (1, 2)


def test_too_few_values_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 12 values or more, found 11"):
        growth("threads", [1] * 11, DONE[:11], STEPS_DONE[:11])
