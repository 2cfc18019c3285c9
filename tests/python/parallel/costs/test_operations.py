"""What rings send for operations."""

from __future__ import annotations

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.operations import BUCKET, Operation, by_kind

TP = ("tp",)


def sent_by_ring(kind: str, size_bytes: int, n: int) -> tuple[int, int]:
    """What rank 1 of a ring sends, chunk by chunk, and in how many messages."""
    chunk = size_bytes // n
    reducing, gathering = [chunk] * (n - 1), [chunk] * (n - 1)  # each rank passes on all chunks but one
    messages = {
        "all_reduce": [*reducing, *gathering],
        BUCKET: [*reducing, *gathering],
        "reduce_scatter": reducing,
        "all_to_all": gathering,
        "broadcast": gathering,
        "all_gather": [size_bytes] * (n - 1),
        "send": [size_bytes],
        "receive": [],
    }[kind]
    return sum(messages), len(messages)


KINDS = ("all_reduce", BUCKET, "reduce_scatter", "all_to_all", "broadcast", "all_gather", "send", "receive")


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_rounds_are_those_of_a_ring(kind: str, n: int) -> None:
    one = Operation(TP, n, kind, 64)
    assert (one.sent_bytes, one.rounds) == sent_by_ring(kind, 64, n)
    three = Operation(TP, n, kind, 64, 3)
    assert (three.sent_bytes, three.rounds) == (3 * one.sent_bytes, 3 * one.rounds)


def test_operations_are_added_up_by_axes_and_kind() -> None:
    given = [
        Operation(TP, 2, "all_reduce", 8, 3),
        Operation(TP, 2, "all_reduce", 4),
        Operation(("pp",), 2, "send", 5, 2),
    ]
    assert by_kind(given) == {TP: {"all_reduce": (4, 28)}, ("pp",): {"send": (2, 10)}}


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"kind='all'; expected one of all_reduce, "):
        Operation(TP, 2, "all", 8)
