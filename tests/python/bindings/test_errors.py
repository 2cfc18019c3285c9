"""Errors of C++ arrive in Python as their own classes."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp import errors
from accelerate_cpp._native import Communicator, choose_device, create_backend, shared_empty

MINUTE = timedelta(minutes=1)


@pytest.fixture
def pair() -> Iterator[list[Communicator]]:
    """Two ranks of one group, both in this process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        yield [
            backend.communicator
            for backend in threads.map(lambda rank: create_backend(store, rank, 2, MINUTE), range(2))
        ]


def on_both(function: Callable[[int], object]) -> list[BaseException | None]:
    """What ``function(rank)`` raises on each rank."""
    with ThreadPoolExecutor(2) as threads:
        return [future.exception() for future in [threads.submit(function, rank) for rank in range(2)]]


def test_invalid_argument() -> None:
    with pytest.raises(errors.InvalidArgument, match="is not a device") as caught:
        choose_device(force_cpu=False, forced="a:b", local_rank=0, accelerators=[])
    assert caught.type is errors.InvalidArgument


def test_timeout() -> None:
    with pytest.raises(errors.Timeout, match=r"rank 0 waited .* for rank 1 in vain") as caught:
        create_backend(dist.HashStore(), 0, 2, timedelta(milliseconds=50))
    assert isinstance(caught.value, TimeoutError)


def test_timeout_of_a_rank_that_waits_for_an_address_in_the_store() -> None:
    with pytest.raises(errors.Timeout, match=r"rank 1 waited .* for rank 0 in vain") as caught:
        create_backend(dist.HashStore(), 1, 2, timedelta(milliseconds=50))
    assert caught.type is errors.Timeout


def test_mismatched_collective(pair: list[Communicator]) -> None:
    raised = on_both(lambda rank: pair[rank].broadcast_tensors([torch.ones(rank + 2)], 0, MINUTE))
    for error in raised:
        assert type(error) is errors.MismatchedCollective
        assert "rank 0: broadcast of [2] float32" in str(error)
        assert "rank 1: broadcast of [3] float32" in str(error)


def test_peer_lost(pair: list[Communicator]) -> None:
    pair[0].abort("no more")
    for error in on_both(lambda rank: pair[rank].broadcast_tensors([torch.ones(1)], 0, MINUTE)):
        assert type(error) is errors.PeerLost
        assert isinstance(error, ConnectionError)
        assert "no more" in str(error)


def test_system_failure_has_the_number_of_the_operating_system() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # for segments too, which are files without a name
    try:
        with pytest.raises(errors.SystemFailure, match=str(1 << 21)) as caught:
            shared_empty([1 << 21], torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert isinstance(caught.value, OSError)
    assert shared_empty([1 << 21], torch.uint8).numel() == 1 << 21


def test_other_exceptions_are_left_to_others() -> None:
    with pytest.raises(RuntimeError, match="nonsense") as caught:
        torch.device("nonsense")
    assert not isinstance(caught.value, errors.AccelerateError)
