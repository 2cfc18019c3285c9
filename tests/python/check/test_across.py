"""What the journals of several ranks say together."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.check.across import judge
from accelerate_cpp.check.task import Task

TASK = Task("train.py", processes=2, configured=2)
END = {"kind": "end", "how": "end", "steps": 2, "backwards": 2, "has_accelerator": True}


def finding(code: str, level: str = "error", where: str = "train.py:1") -> dict[str, Any]:
    return {"kind": "finding", "level": level, "code": code, "what": code, "where": where, "advice": "", "ranks": []}


def call(name: str, line: int = 1) -> dict[str, Any]:
    return {"kind": "call", "name": name, "where": f"train.py:{line}"}


def codes(*ranks: list[dict[str, Any]], crash: tuple[int, str] | None = None) -> list[str]:
    return [one.code for one in judge(TASK, {rank: [*said, END] for rank, said in enumerate(ranks)}, crash)]


def test_the_same_finding_of_two_ranks_is_one() -> None:
    (one,) = judge(TASK, {0: [finding("a"), END], 1: [finding("a"), END]})
    assert one.ranks == (0, 1)


def test_errors_come_first() -> None:
    assert codes([finding("n", "note"), finding("w", "warning"), finding("e")], []) == ["e", "w", "n"]


def test_a_loader_that_one_rank_reads_alone_need_not_be_prepared() -> None:
    assert codes([finding("unprepared-loader")], []) == []


def test_the_first_different_call_is_told() -> None:
    (one,) = judge(TASK, {0: [call("gather"), call("save_state", 2), END], 1: [call("gather"), call("reduce", 3), END]})
    assert (one.code, one.what) == (
        "ranks-diverge",
        "rank 0 calls save_state at train.py:2; rank 1 calls reduce at train.py:3",
    )


def test_a_call_that_others_do_not_make_is_told() -> None:
    assert codes([call("gather")], [call("gather"), call("gather")]) == ["ranks-diverge"]


@pytest.mark.parametrize("consequence", ["lost-peer", "ranks-diverge"])
def test_consequences_of_an_error_are_left_out(consequence: str) -> None:
    assert codes([finding("script-failed")], [finding(consequence)]) == ["script-failed"]
    assert codes([], [finding(consequence)]) == [consequence]


def test_weights_that_differ_are_named() -> None:
    def weights(number: int) -> dict[str, Any]:
        return {"kind": "weights", "model": 0, "steps": 1, "where": "a.py:1", "checksums": {"module.w": number, "b": 0}}

    assert codes([weights(1)], [weights(1)]) == []
    (one,) = judge(TASK, {0: [weights(1), END], 1: [weights(2), END]})
    assert "the weights w are not the same" in one.what


@pytest.mark.parametrize(
    ("lengths", "joins", "expected"), [((2, 3), False, True), ((2, 2), False, False), ((2, 3), True, False)]
)
def test_loaders_of_different_lengths_are_errors_outside_of_join(
    lengths: tuple[int, int], joins: bool, expected: bool
) -> None:
    journals = [
        [{"kind": "loader", "length": length, "where": "a.py:1", "prepared": True, "joins": joins}]
        for length in lengths
    ]
    assert codes(*journals) == (["uneven-ranks"] if expected else [])


def test_a_crash_names_the_rank() -> None:
    assert codes([], [], crash=(1, "exit code 7")) == ["worker-crashed"]


def test_a_script_without_an_accelerator_is_an_error_with_several_processes() -> None:
    journals = {rank: [END | {"has_accelerator": False}] for rank in range(2)}
    assert [one.code for one in judge(TASK, journals)] == ["no-accelerator"]
    assert judge(Task("train.py"), {0: journals[0]}) == []
    assert judge(TASK, {0: [], 1: journals[1]}) == []  # rank 0 was ended before it could tell
