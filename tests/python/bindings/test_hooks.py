"""What C++ asks of the Python program while it communicates."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend, create_backend
from accelerate_cpp.comm import call_site
from accelerate_cpp.errors import InvalidArgument, MismatchedCollective, PeerLost

MINUTE = timedelta(minutes=1)


def run_pair(function: Callable[[C10dBackend], Any], warn_after: timedelta = MINUTE) -> list[Any]:
    """The results of ``function`` on two ranks, which are threads."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda rank: function(create_backend(store, rank, 2, MINUTE, warn_after)), range(2)))


def mismatch(backend: C10dBackend) -> str:
    with pytest.raises(MismatchedCollective) as caught:
        backend.allreduce([torch.ones(backend.rank() + 1)]).wait()
    return str(caught.value)


def test_asynchronous_calls_know_the_users_line() -> None:
    for message in run_pair(mismatch):
        assert message.count("test_hooks.py:") == 2, message


def test_a_place_that_cannot_be_found_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(filename: str) -> str:
        raise RuntimeError(f"{filename} has no name")

    monkeypatch.setattr(call_site, "_shortened", broken)
    backend = create_backend(dist.HashStore(), 0, 1, MINUTE)
    data = torch.ones(2)
    backend.allreduce([data]).wait()
    assert data.tolist() == [1, 1]


def test_a_long_wait_is_a_warning_of_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    def wait(backend: C10dBackend) -> None:
        if backend.rank() == 0:
            work = backend.barrier()
            while not any("rank 1" in record.message for record in caplog.records):
                work.is_completed()
            backend.send([torch.ones(1)], 1, 0).wait()
            work.wait()
        else:
            backend.recv([torch.ones(1)], 0, 0).wait()
            backend.barrier().wait()

    with caplog.at_level(logging.WARNING, "accelerate_cpp.comm"):
        run_pair(wait, timedelta(milliseconds=50))
    assert {(record.name, record.levelname) for record in caplog.records} == {("accelerate_cpp.comm", "WARNING")}


def test_errors_keep_their_type_in_works_and_futures_and_functional_collectives() -> None:
    def types(backend: C10dBackend) -> list[str]:
        if backend.rank() == 0:
            backend.abort()
        found = []
        for call in (
            lambda: backend.barrier().wait(),
            lambda: backend.barrier().get_future().wait(),
            lambda: backend.allreduce([torch.ones(1)]).get_future().then(lambda future: future.value()).wait(),
        ):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - the type is what is tested
                call()
            found.append(caught.type.__name__)
        return found

    first, *others = run_pair(types)
    assert first[:2] == [PeerLost.__name__] * 2
    assert all(own == first for own in others)


def test_an_argument_that_cannot_be_used_is_refused_by_the_call_itself() -> None:
    backend = create_backend(dist.HashStore(), 0, 1, MINUTE)
    with pytest.raises(InvalidArgument, match="expected one tensor"):
        backend.allreduce([torch.ones(1), torch.ones(1)])


@pytest.mark.parametrize("waiting", [True, False])
def test_the_interpreter_ends_although_an_operation_is_under_way(waiting: bool) -> None:
    script = f"""
import threading, torch, torch.distributed as dist
from datetime import timedelta
from accelerate_cpp._native import create_backend
store = dist.HashStore()
made = []
def make(rank):
    made.append(create_backend(store, rank, 2, timedelta(hours=1)))
threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
backend = next(backend for backend in made if backend.rank() == 0)
work = backend.allreduce([torch.ones(4)])
if {waiting}:
    threading.Thread(target=work.wait, daemon=True).start()
work.get_future()  # the thread begins
message = torch.ones(4)
received = backend.recv([message], 1, 0)
received.get_future()
print("done")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
