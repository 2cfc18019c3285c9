"""Schedules: which stages ranks have, what is refused, and how long ranks are idle in torch's own orders."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.schedules import SCHEDULES, Schedule, bubble_fraction, schedule_named

SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass
class Stage:
    """What torch's schedules ask of a stage when they plan."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: Any = field(default_factory=nn.Identity)


Action = tuple[int, str, int]
"""The number of a stage, what it computes, and for which part of the batch."""


def order_of(schedule: Schedule, ranks: int, micro_batches: int) -> dict[int, list[Action]]:
    """What each rank computes, as torch plans it. Torch misnumbers the parts of some; they come in order."""
    from torch.distributed import pipelining

    owners = schedule.ranks_of_stages(ranks)
    stages: Any = [Stage(number, len(owners), ranks) for number, owner in enumerate(owners) if owner == 0]
    built = schedule.build(stages, micro_batches, lambda: None)
    assert isinstance(built, getattr(pipelining, schedule.class_name))
    orders: dict[int, list[Action]] = {}
    for rank in range(ranks):
        parts: Counter[tuple[int, str]] = Counter()
        orders[rank] = []
        for action in filter(None, built.pipeline_order[rank]):
            what = (action.stage_index, action.computation_type.value)
            if what[1] in SECONDS:
                orders[rank].append((*what, parts[what]))
                parts[what] += 1
    return orders


def seconds_of_step(order: dict[int, list[Action]], stages: int) -> int:
    """The time until all ranks have ended, if each computes what comes next as soon as its inputs exist."""
    ended: dict[Action, int] = {}
    free = dict.fromkeys(order, 0)
    waiting = {rank: list(actions) for rank, actions in order.items()}
    while any(waiting.values()):
        before = len(ended)
        for rank, actions in waiting.items():
            while actions:
                stage, kind, part = actions[0]
                needed = [(stage, "I", part)] if kind == "W" else [(stage - 1, "F", part)] if stage else []
                if kind in "BI":
                    needed = [(stage, "F", part), *([(stage + 1, "I", part)] if stage < stages - 1 else [])]
                if any(one not in ended for one in needed):
                    break
                start = max([free[rank], *(ended[one] for one in needed)])
                free[rank] = ended[stage, "I" if kind == "B" else kind, part] = start + SECONDS[kind]
                actions.pop(0)
        assert len(ended) > before, "the order ends in a deadlock"
    return max(free.values())


@pytest.mark.parametrize(("name", "each"), [*((name, None) for name in SCHEDULES), ("interleaved", 3)])
def test_ranks_are_idle_as_long_as_in_the_order_of_torch(name: str, each: int | None) -> None:
    schedule = schedule_named(name, each)
    for ranks in (1, 2, 3, 4, 8):
        stages = ranks * schedule.stages_per_rank
        for micro_batches in range(1, 4 * ranks + 1):
            try:
                schedule.check(ranks, micro_batches)
            except InvalidArgument:
                continue
            whole = seconds_of_step(order_of(schedule, ranks, micro_batches), stages)
            busy = 3 * schedule.stages_per_rank * micro_batches
            found = bubble_fraction(name, stages, micro_batches, each)
            assert found == pytest.approx((whole - busy) / whole), (ranks, micro_batches)


def test_bubbles_are_those_of_the_papers() -> None:
    assert bubble_fraction("gpipe", 4, 12) == pytest.approx(3 / 15)
    assert bubble_fraction("1f1b", 4, 12) == pytest.approx(3 / 15)
    assert bubble_fraction("interleaved", 8, 12) == pytest.approx(3 / 27)
    assert bubble_fraction("zero_bubble", 8, 12) == pytest.approx(3 / 75)
    assert bubble_fraction("1f1b", 1, 5) == 0


def test_stages_are_dealt_out_in_turn_or_folded() -> None:
    assert SCHEDULES["1f1b"].ranks_of_stages(3) == [0, 1, 2]
    assert SCHEDULES["interleaved"].ranks_of_stages(3) == [0, 1, 2, 0, 1, 2]
    assert SCHEDULES["zero_bubble"].ranks_of_stages(3) == [0, 1, 2, 2, 1, 0]


def test_what_a_schedule_cannot_compute_is_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidArgument, match="micro_batches=0; expected at least 1"):
        SCHEDULES["gpipe"].check(2, 0)
    with pytest.raises(
        InvalidArgument, match="on 4 ranks needs at least 4 micro-batches, but micro_batches=3; choose 4"
    ):
        SCHEDULES["1f1b"].check(4, 3)
    with pytest.raises(InvalidArgument, match=r"9 micro-batches in 2 rounds, .*; choose micro_batches=8 or 12"):
        SCHEDULES["interleaved"].check(4, 9)
    with pytest.raises(InvalidArgument, match="expected one of 'gpipe', '1f1b', 'interleaved', 'zero_bubble'"):
        schedule_named("zb")
    with pytest.raises(InvalidArgument, match="stages_per_process=3 with schedule 'zero_bubble', which has 2; leave"):
        schedule_named("zero_bubble", 3)
    with pytest.raises(InvalidArgument, match="stages_per_process=1 with schedule 'interleaved', which has 2 or more"):
        schedule_named("interleaved", 1)
    with pytest.raises(InvalidArgument, match="stages=3; expected a multiple of 2 for 'interleaved'"):
        bubble_fraction("interleaved", 3, 4)
    SCHEDULES["interleaved"].check(4, 10)
    SCHEDULES["zero_bubble"].check(4, 1)


def test_what_is_refused_torch_refuses_too() -> None:
    for name, ranks, micro_batches in [("1f1b", 4, 3), ("interleaved", 4, 9)]:
        with pytest.raises(ValueError, match=r"micro-?batches"):
            order_of(SCHEDULES[name], ranks, micro_batches)
