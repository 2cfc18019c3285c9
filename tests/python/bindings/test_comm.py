"""Communicator and backend as Python sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend, create_backend, reduce_instruction_set, time_waited
from accelerate_cpp.errors import InvalidArgument, PeerLost, Timeout

MINUTE = timedelta(minutes=1)


def run_ranks(size: int, function: Callable[[C10dBackend], Any]) -> list[Any]:
    """The results of ``function`` on every rank of a group of threads."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        return function(create_backend(store, rank, size, MINUTE))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def test_a_backend_knows_its_place_and_its_timeout() -> None:
    def facts(backend: C10dBackend) -> tuple[Any, ...]:
        communicator = backend.communicator
        assert isinstance(backend, dist._Backend)
        return backend.rank(), backend.size(), communicator.rank, communicator.size, backend.name(), backend.timeout

    assert run_ranks(3, facts) == [(rank, 3, rank, 3, "shm", MINUTE) for rank in range(3)]


def test_a_backend_counts_what_is_asked_of_it() -> None:
    def counts(backend: C10dBackend) -> dict[str, tuple[int, int]]:
        for _ in range(2):
            backend.allreduce([torch.ones(3)], dist.AllreduceOptions()).wait()
        backend.barrier(dist.BarrierOptions()).wait()
        return backend.traffic

    assert run_ranks(2, counts) == [{"all_reduce": (2, 24), "barrier": (1, 0)}] * 2


def test_a_single_rank_needs_no_other() -> None:
    backend = create_backend(dist.HashStore(), 0, 1, timedelta(milliseconds=1))
    data = torch.ones(3)
    backend.allreduce([data]).wait()
    assert data.tolist() == [1, 1, 1]


def test_tensors_are_broadcast_in_place_whatever_their_strides_and_dtypes() -> None:
    def received(backend: C10dBackend) -> list[Any]:
        rank = backend.rank()
        tensors = [torch.full((2, 3), float(rank)).t(), torch.full((4,), rank), torch.full((), rank > 0)]
        parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
        backend.communicator.broadcast_tensors(tensors=[*tensors, parameter], root=1, timeout=MINUTE)
        assert parameter.requires_grad
        return [tensor.tolist() for tensor in (*tensors, parameter)]

    assert run_ranks(2, received) == [[[[1.0] * 2] * 3, [1] * 4, True, [1.0] * 2]] * 2


def test_an_aborted_communicator_gives_the_reason() -> None:
    communicator = create_backend(dist.HashStore(), 0, 1, MINUTE).communicator
    communicator.abort(reason="the test says so")
    with pytest.raises(PeerLost, match="the test says so"):
        communicator.broadcast_tensors([torch.ones(1)], 0, MINUTE)


def test_a_root_must_be_a_rank() -> None:
    communicator = create_backend(dist.HashStore(), 0, 1, MINUTE).communicator
    with pytest.raises(InvalidArgument, match="root 1 is not a rank of this group of 1"):
        communicator.broadcast_tensors([torch.ones(1)], 1, MINUTE)


def test_tensors_without_a_name_in_the_core_are_broadcast_too() -> None:
    def received(backend: C10dBackend) -> list[Any]:
        tensors = [torch.full((3,), backend.rank() + 1).to(torch.uint16), torch.full((2,), 1j * backend.rank())]
        backend.communicator.broadcast_tensors(tensors, 0, MINUTE)
        return [tensors[0].tolist(), tensors[1].tolist()]

    assert run_ranks(2, received) == [[[1, 1, 1], [0, 0]]] * 2


def test_the_communicator_of_a_backend_keeps_the_order_of_its_operations() -> None:
    def values(backend: C10dBackend) -> list[float]:
        data = torch.full((2,), float(backend.rank()))
        works = [backend.allreduce([data]) for _ in range(3)]
        backend.communicator.broadcast_tensors([data], 1, MINUTE)
        assert all(work.is_completed() for work in works)
        return data.tolist()

    assert run_ranks(2, values) == [[4.0, 4.0]] * 2


def test_a_wait_of_no_time_at_all_is_reported_unless_that_is_never(caplog: pytest.LogCaptureFixture) -> None:
    for warn_after, reported in ((timedelta(milliseconds=1), True), (timedelta(0), False)):
        caplog.clear()
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as threads:
            backends = list(
                threads.map(lambda rank, s=store, w=warn_after: create_backend(s, rank, 2, MINUTE, w), (0, 1))
            )
            first = threads.submit(lambda b=backends: b[0].barrier().wait())
            with pytest.raises(Timeout):
                backends[0].barrier().wait(timedelta(milliseconds=300))
            assert any("rank 1" in record.message for record in caplog.records) is reported
            for _ in range(2):
                backends[1].barrier().wait()
            first.result()


def test_python_goes_on_while_a_rank_waits() -> None:
    # Without releasing the interpreter lock, no second thread could become the other rank.
    assert run_ranks(2, lambda backend: backend.barrier().wait()) == [True, True]


def test_the_instructions_in_use_have_a_name() -> None:
    assert reduce_instruction_set() in {"avx512", "avx2", "portable"}


def test_time_waited_is_that_of_the_rank_that_came_first() -> None:
    came = threading.Event()

    def waited(backend: C10dBackend) -> timedelta:
        total = timedelta()
        while True:
            before = time_waited()
            if backend.rank() == 1:
                assert came.wait(60)
                came.clear()
            else:
                came.set()
            backend.barrier().wait()
            total += time_waited() - before
            enough = torch.tensor([float(total > timedelta())]) if backend.rank() == 0 else torch.zeros(1)
            backend.broadcast([enough]).wait()
            if enough.item():
                return total

    waits = run_ranks(2, waited)
    assert waits[0] > timedelta()
    assert waits[1] >= timedelta()
