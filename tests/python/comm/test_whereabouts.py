"""Ranks are threads that share a store, and count the collectives that they would issue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate_cpp.comm.whereabouts import Whereabouts
from accelerate_cpp.errors import PeerLost, Timeout

PATIENCE = timedelta(seconds=120)


class Rank:
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.number = rank
        self.issued: int | None = 0
        self.place = Whereabouts(store, rank, size, lambda: self.issued, timeout)


@contextmanager
def ranks(size: int, timeout: timedelta = PATIENCE) -> Iterator[list[Rank]]:
    store = dist.HashStore()
    all_ranks = [Rank(store, rank, size, timeout) for rank in range(size)]
    try:
        yield all_ranks
    finally:
        for rank in all_ranks:
            rank.place.end()
        assert not [thread for thread in threading.enumerate() if thread.name == "accelerate-cpp-whereabouts"]


def on_all(all_ranks: list[Rank], action: Callable[[Rank], object]) -> list[object]:
    """What ``action`` returns on each, run side by side."""
    results: list[object] = [None] * len(all_ranks)

    def run(rank: Rank) -> None:
        results[rank.number] = action(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in all_ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_that_are_there_know_it_however_often_they_meet() -> None:
    with ranks(3) as all_ranks:
        for _ in range(10):
            assert on_all(all_ranks, lambda rank: rank.place.meet("save")) == [[0, 1, 2]] * 3
        assert not any(rank.place.someone_has_left() for rank in all_ranks)


def test_a_rank_that_has_issued_another_collective_is_elsewhere() -> None:
    def action(rank: Rank) -> object:
        if rank.number == 1:
            rank.issued = 1
            return None
        return rank.place.meet("save")

    with ranks(3) as all_ranks:
        assert on_all(all_ranks, action) == [[0, 2], None, [0, 2]]


def test_calls_on_two_topics_come_one_after_the_other() -> None:
    def action(rank: Rank) -> object:
        alone = rank.place.meet("mine") if rank.number == 0 else []
        return alone, rank.place.meet("ours")

    with ranks(2) as all_ranks:
        assert on_all(all_ranks, action) == [([0], [0, 1]), ([], [0, 1])]


@pytest.mark.parametrize("leave", ["ends", "has no group any more"])
def test_a_rank_that_goes_is_elsewhere(leave: str) -> None:
    def action(rank: Rank) -> object:
        if rank.number == 0:
            return rank.place.meet("save"), rank.place.someone_has_left()
        if leave == "ends":
            rank.place.end()
        else:
            rank.issued = None
        return None

    with ranks(2) as all_ranks:
        assert on_all(all_ranks, action) == [([0], True), None]


def test_a_rank_that_ends_with_an_error_is_missed_once() -> None:
    def action(rank: Rank) -> object:
        if rank.number == 1:
            return rank.place.end(ValueError("7\n8"))
        with pytest.raises(PeerLost, match=r"rank 1 failed: its program ended with ValueError: 7$"):
            rank.place.meet("save")
        return rank.place.meet("save"), rank.place.someone_has_left()

    with ranks(2) as all_ranks:
        assert on_all(all_ranks, action) == [([0], False), None]


def test_a_rank_that_ends_with_an_error_while_all_meet_is_missed_at_once() -> None:
    """The first two have answered each other; the third answers once the first has given up."""
    store, told = dist.HashStore(), list[str]()

    def meet_in_vain() -> None:
        with pytest.raises(PeerLost) as caught:
            second.meet("save")
        told.append(str(caught.value))

    first = Whereabouts(store, 0, 3, lambda: 0, timedelta(seconds=1))
    second = Whereabouts(store, 1, 3, lambda: 0, PATIENCE)
    thread = threading.Thread(target=meet_in_vain)
    thread.start()
    with pytest.raises(Timeout) as late:
        first.meet("save")
    first.end(late.value)
    third = Whereabouts(store, 2, 3, lambda: 1, PATIENCE)
    thread.join()
    second.end()
    third.end()
    assert told
    assert told[0].startswith("rank 1 waited for rank 0: rank 0 failed: its program ended with Timeout")


def test_who_did_not_come_is_named() -> None:
    with ranks(2, timedelta(0)) as all_ranks, pytest.raises(Timeout, match=r"rank 0 waited \d s for rank 1, which"):
        all_ranks[0].place.meet("save")


def test_a_store_that_has_gone_with_its_process_is_told_as_such() -> None:
    held: dist.Store | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert held is not None
    there = dist.TCPStore("127.0.0.1", held.port, is_master=False)
    rank = Rank(there, 1, 2, PATIENCE)
    held = None  # as when rank 0 is killed
    rank.place._thread.join(PATIENCE.total_seconds())
    assert rank.place.someone_has_left()
    with pytest.raises(PeerLost, match=r"^rank 1 waited for the others, but a rank has left the group: its store"):
        rank.place.meet("save")
    assert (rank.place.meet("save"), rank.place.someone_has_left()) == ([1], True)
    rank.place.end()
