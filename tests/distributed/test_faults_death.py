"""What the other ranks say when one is killed, ends or stops, whatever they wait in; and that nothing is left."""

from __future__ import annotations

import inspect
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults import TEST, Job, Raised, await_event, connect, die, limit_waits, meet, raised_by, rank, tell
from processes import Outcome
from waits import WAITS

pytestmark = pytest.mark.long

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

KILLED = {1: -signal.SIGKILL}
# What is aimed at is 2 s; machines may be busy.
SOON = 20.0

Record = Callable[[str, object], None]


def check_lost(outcomes: list[Outcome], at: float, record: Record, text: str = "rank 1 has ended") -> None:
    """All ranks but rank 1 have raised PeerLost with ``text``, soon after ``at``."""
    raised = [outcome.value for outcome in outcomes if outcome.rank != 1]
    record("seconds", max(one.at - at for one in raised))
    for one in raised:
        assert one.kind == "PeerLost", one
        assert text in one.message, one
        assert one.at - at < SOON


def check_place(outcomes: list[Outcome], wait: str) -> None:
    """The messages say in which line of :mod:`waits` the ranks but rank 1 were."""
    lines, first = inspect.getsourcelines(WAITS[wait])
    for outcome in outcomes:
        if outcome.rank != 1:
            places = re.findall(r"waits\.py:(\d+)", outcome.value.message)
            assert [place for place in places if first <= int(place) < first + len(lines)], outcome.value


def wait_for_rank_1(wait: str) -> Raised:
    dist = connect()
    waiter = WAITS[wait](dist)
    meet("prepared")
    if rank() == 1:
        tell("ready")
        await_event("never", TEST)
    tell("waiting")
    return raised_by(waiter)


@pytest.mark.parametrize("wait", WAITS)
def test_a_killed_rank_is_named_by_all_that_wait_for_it(wait: str, record_property: Record) -> None:
    with Job(wait_for_rank_1, 3, wait) as job:
        job.await_event("ready", 1)
        for waiting in (0, 2):
            job.await_event("waiting", waiting)
        at = job.signal(1, signal.SIGKILL)
        outcomes = job.finish(failing=KILLED)
    check_lost(outcomes, at, record_property)
    check_place(outcomes, wait)


@pytest.mark.parametrize("wait", ["all_reduce", "receive", "accelerator_backward"])
def test_a_stopped_rank_is_named_when_the_timeout_is_over(wait: str, record_property: Record) -> None:
    with Job(wait_for_rank_1_a_second, 2, wait) as job:
        process = job.process(1)
        job.await_event("ready", 1)
        at = job.signal(1, signal.SIGSTOP)
        job.tell("stopped")
        job.await_event("raised", 0)
        os.kill(process, signal.SIGCONT)
        waited, resumed = (outcome.value for outcome in job.finish())
    record_property("seconds", waited.at - at)
    assert waited.kind == "Timeout"
    assert "rank 1" in waited.message
    assert waited.at - at < SOON
    if wait != "receive":
        assert resumed.kind == "PeerLost"
        assert "rank 0" in resumed.message


def wait_for_rank_1_a_second(wait: str) -> Raised:
    dist = connect()
    limit_waits(dist, 1)
    waiter = WAITS[wait](dist)
    meet("prepared")
    if rank() == 1:
        tell("ready")
        await_event("stopped", TEST)
        await_event("raised", 0)
        return raised_by(lambda: dist.barrier() if wait == "receive" else waiter())
    await_event("stopped", TEST)
    raised = raised_by(waiter)
    tell("raised")
    if wait == "receive":  # a message that did not come does not make the group unusable
        dist.barrier()
    return raised


def reduce_until_something_happens() -> Raised:
    import torch

    dist = connect()
    large, small = torch.ones(2 << 20), torch.ones(100)

    def reduce() -> None:
        while True:
            dist.all_reduce(large)
            dist.all_reduce(small)
            dist.all_gather([torch.empty(100) for _ in range(dist.get_world_size())], small)
            large.fill_(1)
            small.fill_(1)

    tell("reducing")
    return raised_by(reduce)


def kill_at_random(seed: int, record: Record) -> None:
    """Kills one of three ranks at some moment in the middle of its collectives."""
    chance = random.Random(seed)
    victim = chance.randrange(3)
    with Job(reduce_until_something_happens, 3) as job:
        for each in range(3):
            job.await_event("reducing", each)
        time.sleep(chance.random() * 0.2)  # any moment will do
        at = job.signal(victim, signal.SIGKILL)
        outcomes = job.finish(failing={victim: -signal.SIGKILL})
    raised = [outcome.value for outcome in outcomes if outcome.rank != victim]
    record(f"seconds_{seed}", max(one.at - at for one in raised))
    for one in raised:
        assert one.kind == "PeerLost", one
        assert f"rank {victim} has ended" in one.message, one
        assert one.at - at < SOON


def test_a_rank_killed_at_any_moment_is_named(record_property: Record) -> None:
    for seed in range(3):
        kill_at_random(seed, record_property)


@pytest.mark.long
def test_fifty_ranks_killed_at_random_are_named_and_leave_nothing(record_property: Record) -> None:
    for seed in range(3, 53):
        kill_at_random(seed, record_property)


def fail() -> None:
    raise ValueError("an error of the script")


def leave(how: str, dist: Any) -> None:
    """Ends this rank, or its part in the group."""
    import torch

    if how == "exit":
        sys.exit(0)
    if how == "abrupt exit":
        os._exit(0)
    if how == "exit with an operation under way":
        dist.all_reduce(torch.ones(4), async_op=True)
        sys.exit(0)
    if how == "exception":
        fail()
    if how == "destruction of the group":
        dist.destroy_process_group()


def leave_early(wait: str, how: str) -> Raised | None:
    dist = connect()
    waiter = WAITS[wait](dist)
    meet("prepared")
    if rank() == 1:
        leave(how, dist)
        return None
    return raised_by(waiter)


@pytest.mark.parametrize("wait", ["barrier", "accelerator_backward"])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exit", "rank 1 has left the group"),
        ("abrupt exit", "rank 1 has ended"),
        ("exception", "rank 1 failed: its program ended with ValueError: an error of the script"),
        ("destruction of the group", "rank 1 has left the group"),
    ],
)
def test_a_rank_that_leaves_is_named(wait: str, how: str, told: str, record_property: Record) -> None:
    at = time.monotonic()
    failing = {1: 1} if how == "exception" else {}
    with Job(leave_early, 3, wait, how, finalize=True) as job:
        outcomes = job.finish(failing=failing)
    check_lost(outcomes, at, record_property, text=told)


def die_in_backward(late: bool) -> Raised:
    """Rank 1 is killed before its first gradient or between two."""
    import torch

    from accelerate_cpp import Accelerator

    class Deadly(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, data: Any) -> Any:
            return data.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            if rank() == 1:
                die()
            return gradient

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, data: Any) -> Any:
            data = self.body(data)
            return self.head(Deadly.apply(data)) if late else Deadly.apply(self.head(data))

    connect()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Model())
    loss = model(torch.ones(2, 4)).sum()
    tell("backward")
    return raised_by(lambda: accelerator.backward(loss))


@pytest.mark.parametrize("late", [True, False], ids=["between_two_gradients", "before_any_gradient"])
def test_a_rank_killed_in_backward_is_named(late: bool, record_property: Record) -> None:
    at = time.monotonic()
    with Job(die_in_backward, 3, late) as job:
        check_lost(job.finish(failing=KILLED), at, record_property)


def sum_until_told(offset: int) -> Raised | list[float]:
    import torch

    dist = connect()
    sums: list[float] = []

    def add() -> None:
        while len(sums) < 200:
            data = torch.full((1000,), float(rank() + offset + len(sums)))
            dist.all_reduce(data)
            sums.append(data.mean().item())
            if len(sums) == 100 and offset == 0:
                tell("halfway")
                await_event("killed", TEST)

    raised = raised_by(add)
    return raised if raised.kind != "nothing" else sums


def test_a_second_job_on_the_machine_does_not_notice_that_the_first_is_killed(record_property: Record) -> None:
    with Job(sum_until_told, 2, 5000) as second, Job(sum_until_told, 2, 0) as first:
        for each in range(2):
            first.await_event("halfway", each)
        at = first.signal(1, signal.SIGKILL)
        first.tell("killed")
        check_lost(first.finish(failing=KILLED), at, record_property)
        for outcome in second.finish():
            assert outcome.value == [10001.0 + 2 * step for step in range(200)]


def test_that_what_jobs_leave_is_seen() -> None:
    """The check that all these tests rely on."""
    with Job(leave_a_mess, 1) as job:
        with pytest.raises(AssertionError, match=r"process.*socket.*shared memory.*temporary"):
            job.finish()
        Path(f"/dev/shm/torch_{job.process(0)}_rubbish").unlink()


def leave_a_mess() -> None:
    import socket

    Path(os.environ["TMPDIR"], "rubbish").touch()
    Path(f"/dev/shm/torch_{os.getpid()}_rubbish").touch()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0accelerate_cpp-{os.getpid()}")
    if os.fork() == 0:
        signal.pause()
