"""Runs that go on and on hold what they held at first; those that lose something on purpose are noticed."""

from __future__ import annotations

import sys

import pytest

import watched

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's"),
]

SECONDS = 60.0
"""Of each size; :mod:`run` does the same for as long as one likes."""
ROUNDS = 45
LAUNCHES = 200


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_hold_what_they_held(processes: int) -> None:
    assert watched.ranks(processes, SECONDS, rounds=ROUNDS).growing() == []


def test_a_kernel_holds_what_it_held_after_200_launches() -> None:
    assert watched.kernel(LAUNCHES).growing() == []


@pytest.mark.parametrize(("leak", "measure"), [("descriptors", "descriptors"), ("memory", "anonymous_bytes")])
def test_what_ranks_lose_is_noticed_and_nothing_else(leak: str, measure: str) -> None:
    growing = watched.ranks(2, SECONDS, leak=leak, rounds=ROUNDS).growing()
    assert [sentence.split(": ")[1] for sentence in growing] == [f"rank{rank}, {measure}" for rank in range(2)]


def test_what_a_kernel_loses_is_noticed() -> None:
    growing = watched.kernel(40, leak="descriptors").growing()
    assert [sentence.split(": ")[1] for sentence in growing] == ["kernel, descriptors"]
