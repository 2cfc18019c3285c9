"""Errors and warnings of backend shm name the lines of the user's program that made the calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from processes import run_processes, start_processes
from shm_scenarios import ShmScenarios, meet, register, report, tell, wait_for

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SCENARIOS = ShmScenarios()
HERE = os.path.relpath(__file__)


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=(2, 3))
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


def line() -> int:
    return sys._getframe(1).f_lineno


def table_of(function: Any) -> str:
    """The message of the mismatch that ``function`` raises."""
    with pytest.raises(Exception, match="rank") as caught:
        function()
    assert caught.type.__name__ == "MismatchedCollective"
    return str(caught.value)


@SCENARIOS.add
def a_mismatch_of_synchronous_calls_names_every_line(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    def call() -> None:
        if rank == 0:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(3))

    first = call.__code__.co_firstlineno
    table = table_of(call)
    assert f"{HERE}:{first + 2}" in table, table
    assert table.count(f"{HERE}:{first + 4}") == size - 1, table


@SCENARIOS.add
def a_mismatch_of_asynchronous_calls_names_where_they_were_made(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    work, made = dist.all_reduce(torch.ones(3 + rank), async_op=True), line()
    table = table_of(work.wait)
    assert table.count(f"{HERE}:{made}") == size, table
    assert all(f"[{3 + peer}]" in table for peer in range(size)), table


@SCENARIOS.add
def calls_within_torch_are_those_of_the_user(rank: int, size: int) -> None:
    import torch.distributed as dist

    def call() -> None:
        if rank == 0:
            dist.broadcast_object_list(["object"])
        else:
            dist.all_gather_object([None] * size, "object")

    first = call.__code__.co_firstlineno
    table = table_of(call)
    assert f"{HERE}:{first + 2}" in table, table
    assert table.count(f"{HERE}:{first + 4}") == size - 1, table


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    assert not report(failures, name), report(failures, name)


class Records:
    """A handler that keeps what the package's logger says."""

    def __init__(self, on_message: Callable[[str], None] = lambda message: None) -> None:
        import logging

        self.messages: list[str] = []

        def emit(record: logging.LogRecord) -> None:
            self.messages.append(record.getMessage())
            on_message(self.messages[-1])

        handler = logging.Handler()
        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger("accelerate_cpp.comm").addHandler(handler)


def slow(asynchronous: bool, quiet: bool) -> tuple[list[str], int]:
    """What rank 0, which waits for rank 1, logs; and the line of its call.

    Rank 1 comes when rank 0 has said something; if ``quiet``, after a second.
    """
    import torch

    dist = register()
    dist.init_process_group("cpu:shm")
    rank, made = dist.get_rank(), 0
    records = Records(lambda message: tell("rank 0 has warned") if "all_reduce" in message else None)
    if rank == 0:
        work, made = dist.all_reduce(torch.ones(3), async_op=True), line()
        if asynchronous:
            work.get_future()  # the thread runs it
        while asynchronous and not records.messages:
            work.is_completed()
        work.wait()
    else:
        if quiet:
            import time

            time.sleep(1)  # a rank that is late, for longer than the other would wait without a word
        else:
            wait_for("rank 0 has warned")
        dist.all_reduce(torch.ones(3))
    meet("done", rank, 2)
    return records.messages, made


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_rank_that_waits_for_long_says_for_whom_and_where_it_is(asynchronous: bool) -> None:
    environment = {"ACCELERATE_CPP_SLOW_WAIT_SECONDS": "0.2"}
    (messages, made), _ = run_processes(slow, 2, asynchronous, False, environment=environment)
    [message] = [message for message in messages if "all_reduce" in message]
    assert "rank 1" in message
    assert f"{HERE}:{made}" in message


def test_nothing_is_said_when_that_is_asked_for() -> None:
    environment = {"ACCELERATE_CPP_SLOW_WAIT_SECONDS": "0"}
    (messages, _), _ = run_processes(slow, 2, False, True, environment=environment)
    assert messages == []


def test_a_variable_that_is_no_number_is_refused() -> None:
    outcomes = start_processes(slow, 2, False, True, environment={"ACCELERATE_CPP_SLOW_WAIT_SECONDS": "soon"})
    for outcome in outcomes:
        assert outcome.exit_code != 0
        assert "ACCELERATE_CPP_SLOW_WAIT_SECONDS='soon': expected a number of seconds" in outcome.stderr
