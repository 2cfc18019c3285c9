"""Loaders of processes that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from accelerate_cpp.data.samplers import BatchSamplerShard
from accelerate_cpp.data.uneven import overriding_even_batches, while_all_have_some, while_any_has_some
from accelerate_cpp.errors import InvalidArgument


def _read(own: int, other: int, raises: bool) -> list[tuple[int, bool, bool]]:
    """What a process with ``own`` batches reads beside one with ``other``."""
    asked = 0

    def who_has(has: bool) -> list[bool]:
        nonlocal asked
        asked += 1
        assert has == (asked <= own)
        return [has, asked <= other]

    batches = ((number, number == own - 1) for number in range(own))
    return list(while_all_have_some(batches, who_has, raises))


def _joined(own: int, other: int) -> list[tuple[str, bool, bool]]:
    """What a process with ``own`` batches reads beside one with ``other``."""
    asked = iter(range(1 + max(own, other)))

    def who_has(has: bool) -> list[bool]:
        return [next(asked) < other, has]

    batches = iter([(f"own {number}", number == own - 1) for number in range(own)])
    steps = list(while_any_has_some(batches, who_has, lambda rank, _: f"first of rank {rank}"))
    assert [first for *_, first in steps] == [0 if step < other else 1 for step in range(len(steps))]
    return [step[:3] for step in steps]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (1, 3, [("own 0", False, False), ("own 0", False, True), ("own 0", True, True)]),
        (2, 1, [("own 0", False, False), ("own 1", True, False)]),
        (0, 2, [("first of rank 0", False, True), ("first of rank 0", True, True)]),
        (0, 0, []),
    ],
)
def test_the_last_batch_is_repeated_while_another_process_has_more(
    own: int, other: int, expected: list[tuple[str, bool, bool]]
) -> None:
    assert _joined(own, other) == expected


@pytest.mark.parametrize("raises", [True, False])
def test_even_loaders_are_read_to_the_end(raises: bool) -> None:
    assert _read(2, 2, raises) == [(0, False, False), (1, True, False)]
    assert _read(0, 0, raises) == []


def test_a_longer_loader_stops_with_the_shorter_one() -> None:
    assert _read(3, 2, raises=False) == [(0, False, False), (1, True, True)]
    assert _read(2, 3, raises=False) == [(0, False, False), (1, True, False)]
    assert _read(1, 0, raises=False) == []


@pytest.mark.parametrize(
    ("own", "other", "message"), [(3, 2, "rank 1 had 2 batches, and rank 0"), (0, 1, "rank 0 had 0")]
)
def test_uneven_loaders_raise_on_both_sides(own: int, other: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        _read(own, other, raises=True)


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_even_batches_are_overridden_and_restored() -> None:
    shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(5)), 2, False), 2, 0)
    loader = DataLoader(torch.arange(5), batch_sampler=shard)  # type: ignore[arg-type]
    with overriding_even_batches([loader], even_batches=False):
        assert not shard.even_batches
    assert shard.even_batches
    with overriding_even_batches([loader], even_batches=None):
        assert shard.even_batches


def test_streams_cannot_be_made_even_or_uneven() -> None:
    with (
        pytest.warns(UserWarning, match="map-style"),
        overriding_even_batches([DataLoader(_Stream(), batch_size=2)], even_batches=False),
    ):
        pass
