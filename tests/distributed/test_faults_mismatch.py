"""Mistakes in scripts are told in one sentence or table that names ranks, operations and lines of the script."""

from __future__ import annotations

import inspect
import re
import time

import pytest

from faults import Raised, connect, limit_waits, meet, raised_by, run_job, tell
from mismatches import MISTAKES, TIMEOUT

pytestmark = pytest.mark.long

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.


def make_all_mistakes() -> dict[str, tuple[Raised, float]]:
    """What each mistake raised on this rank, and after how many seconds."""
    outcomes = {}
    for name, mistake in MISTAKES.items():
        dist = connect(name)
        limit_waits(dist, TIMEOUT.total_seconds())
        meet(f"begin-{name}")
        start = time.monotonic()
        raised = raised_by(lambda mistake=mistake, dist=dist: mistake.script(dist))
        outcomes[name] = (raised, raised.at - start)
        if raised.kind != "nothing":
            tell(f"raised-{name}")
        meet(f"over-{name}")  # neither leaves before the other is told
        if dist.is_initialized():
            dist.destroy_process_group()
        _forget_the_accelerator()
    return outcomes


def _forget_the_accelerator() -> None:
    from accelerate_cpp.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, tuple[Raised, float]]]:
    return run_job(make_all_mistakes, 2)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_to_every_rank_that_it_concerns(
    name: str, outcomes: list[dict[str, tuple[Raised, float]]], record_property: pytest.RecordProperty
) -> None:
    mistake = MISTAKES[name]
    record_property("seconds", [outcome[name][1] for outcome in outcomes])
    for each, kind in enumerate(mistake.kinds):
        raised, seconds = outcomes[each][name]
        assert raised.kind in kind.split("|"), raised
        assert seconds < 20
    message = outcomes[0][name][0].message
    for text in mistake.texts:
        assert text in message
    lines, first = inspect.getsourcelines(mistake.script)
    places = {int(line) for line in re.findall(r"mismatches\.py:(\d+)", message)}
    assert len(places) == mistake.places, message
    assert all(first <= place < first + len(lines) for place in places), message


def test_enough_mistakes_are_tried() -> None:
    assert len(MISTAKES) >= 20
