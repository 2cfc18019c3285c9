"""A store that torch's agent keeps through all attempts at a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate_cpp.comm import process_group
from accelerate_cpp.comm.fresh_store import _accept, _Call, _propose, fresh_store
from accelerate_cpp.errors import InvalidArgument, Timeout

PATIENCE = timedelta(seconds=200)
IMPATIENCE = timedelta(seconds=0.2)


class Run:
    """A store, and processes, which are threads here, that meet in it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.store, self.pool = dist.HashStore(), pool
        self.keys = dist.PrefixStore("accelerate_cpp/attempts", self.store)

    def start(self, rank: int, world_size: int, timeout: timedelta = PATIENCE) -> Future[dist.Store]:
        return self.pool.submit(fresh_store, self.store, rank, world_size, timeout)

    def meet(self, world_size: int) -> list[dist.Store]:
        return [process.result() for process in [self.start(rank, world_size) for rank in range(world_size)]]

    def came_and_died(self, rank: int) -> str:
        """As if a process of ``rank`` had come and nothing more; its name."""
        return f"{rank}/{self.keys.add(f'{rank}/calls', 1)}"


@pytest.fixture
def run() -> Iterator[Run]:
    with ThreadPoolExecutor(16) as pool:
        yield Run(pool)


def each_finds_what_the_last_rank_writes(stores: list[dist.Store], text: str) -> bool:
    stores[-1].set("address", text)
    return [store.get("address") for store in stores] == [text.encode()] * len(stores)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_attempts_do_not_see_what_earlier_ones_wrote(run: Run, world_size: int) -> None:
    for attempt in range(20):
        stores = run.meet(world_size)
        assert not any(store.check(["address"]) for store in stores)
        assert each_finds_what_the_last_rank_writes(stores, str(attempt))


def test_ranks_may_become_fewer_and_more(run: Run) -> None:
    for world_size in (4, 2, 1, 3, 4):
        stores = run.meet(world_size)
        assert not stores[0].check(["address"])
        assert each_finds_what_the_last_rank_writes(stores, "here")


@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_rank_that_is_started_anew_is_met_by_the_others(run: Run, dies: int) -> None:
    run.meet(3)
    with pytest.raises(Timeout):  # it has said that it is there, and has gone
        run.start(dies, 3, IMPATIENCE).result()
    assert each_finds_what_the_last_rank_writes(run.meet(3), "here")


def test_a_rank_that_dies_while_the_others_meet_is_met_by_them_when_it_is_back(run: Run) -> None:
    name = run.came_and_died(2)
    waiting = [run.start(0, 3), run.start(1, 3)]
    run.keys.wait(["proposal"])
    run.keys.wait([f"{run.keys.get('proposal').decode()}/present"])
    assert name in run.keys.get(f"{run.keys.get('proposal').decode()}/present").decode()
    assert not any(process.done() for process in waiting)
    stores = [process.result() for process in [*waiting, run.start(2, 3)]]
    assert each_finds_what_the_last_rank_writes(stores, "here")


@pytest.mark.parametrize("world_size", [2, 4])
def test_groups_that_are_made_one_after_the_other_are_of_the_same_calls(run: Run, world_size: int) -> None:
    def several(rank: int) -> list[dist.Store]:
        return [fresh_store(run.store, rank, world_size, PATIENCE) for _ in range(10)]

    processes = [run.pool.submit(several, rank) for rank in range(world_size)]
    for number, stores in enumerate(zip(*(process.result() for process in processes), strict=True)):
        assert each_finds_what_the_last_rank_writes(list(stores), str(number))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_process_whose_rank_was_started_again_is_left_out(run: Run, rank: int) -> None:
    old = _Call(run.keys, rank, 3, PATIENCE)
    new = run.start(rank, 3)
    with pytest.raises(InvalidArgument, match=f"RANK={rank} was started again"):
        _accept(old) if rank else _propose(old)
    others = [run.start(each, 3) for each in range(3) if each != rank]
    assert each_finds_what_the_last_rank_writes([process.result() for process in [new, *others]], "here")


def test_what_a_rank_0_from_before_proposes_last_is_proposed_over(run: Run) -> None:
    leader = run.start(0, 2)
    run.came_and_died(1)
    run.keys.wait(["proposal"])
    run.keys.set("0/0/1/present", '["1/2"]')
    run.keys.set("proposal", "0/0/1")
    stores = [process.result() for process in [leader, run.start(1, 2)]]
    assert each_finds_what_the_last_rank_writes(stores, "here")


@pytest.mark.parametrize(
    ("present", "missing", "for_rank_1"),
    [
        ([1, 2], 3, "rank 3;"),
        ([2, 3], 1, "rank 0, or a rank that it waits for;"),
        ([], 1, "rank 2;"),
        ([1, 2, 3], 1, "rank 0, or a rank that it waits for;"),
    ],
)
def test_the_rank_that_does_not_come_is_named(run: Run, present: list[int], missing: int, for_rank_1: str) -> None:
    for rank in present:
        run.came_and_died(rank)
    with pytest.raises(Timeout, match=rf"did not all join within 0\.2 s: waited for rank {missing};"):
        fresh_store(run.store, 0, 4, IMPATIENCE)
    with pytest.raises(Timeout, match=rf"within 0\.2 s: waited for {for_rank_1}"):
        fresh_store(run.store, 1, 4, IMPATIENCE)


def test_rank_0_is_named_by_the_others_if_it_does_not_come(run: Run) -> None:
    with pytest.raises(Timeout, match=r"waited for rank 0;"):
        fresh_store(run.store, 1, 2, IMPATIENCE)


def test_a_long_wait_is_told_of_once(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_SLOW_WAIT_SECONDS", "0.01")
    with pytest.raises(Timeout):
        fresh_store(run.store, 0, 2, IMPATIENCE)
    (told,) = caplog.messages
    assert re.fullmatch(r"forming a group of 2 ranks: rank 0 waited \d s for rank 1 until now", told)


@pytest.mark.parametrize("agents", [True, False])
def test_the_store_of_an_agent_is_not_used_as_it_is(monkeypatch: pytest.MonkeyPatch, agents: bool) -> None:
    store = dist.HashStore()
    store.set("address", "of the dead")
    monkeypatch.delenv("ACCELERATE_CPP_RENDEZVOUS_FD", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agents))
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 1)]))
    found, rank, world_size = process_group._rendezvous(PATIENCE)
    assert (rank, world_size) == (0, 1)
    assert found.check(["address"]) is not agents
