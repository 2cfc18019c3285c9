"""Communicator and backend as Python sees them."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend, create_backend, reduce_instruction_set
from accelerate_cpp.errors import InvalidArgument, PeerLost

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


def test_a_single_rank_needs_no_other() -> None:
    backend = create_backend(dist.HashStore(), 0, 1, timedelta(milliseconds=1))
    data = torch.ones(3)
    backend.allreduce([data]).wait()
    assert data.tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype"), [([], torch.float64), ([3], torch.bool), ([2, 0], torch.float32), ([300, 1000], torch.bfloat16)]
)
def test_shared_tensors_have_the_shape_and_dtype_asked_for_and_work_in_collectives(
    size: int, shape: list[int], dtype: torch.dtype
) -> None:
    def total(backend: C10dBackend) -> torch.Tensor:
        tensor = backend.communicator.shared_empty(shape, dtype)
        assert tensor.is_contiguous()
        tensor.fill_(1)
        backend.allreduce([tensor]).wait()
        return tensor.clone()

    for result in run_ranks(size, total):
        assert torch.equal(result, torch.full(shape, size, dtype=torch.float64).to(dtype))
        assert result.dtype == dtype


def test_a_shared_tensor_outlives_its_communicator() -> None:
    def make(backend: C10dBackend) -> torch.Tensor:
        return backend.communicator.shared_empty(size=[1000], dtype=torch.float32).fill_(7)

    tensors = run_ranks(2, make)
    gc.collect()
    assert [tensor.sum().item() for tensor in tensors] == [7000, 7000]


@pytest.mark.parametrize("shape", [[-1], [2, -3], [1 << 62], [1 << 40, 1 << 40]])
def test_a_shape_that_cannot_be_is_refused(shape: list[int]) -> None:
    script = f"""
import torch, torch.distributed as dist
from datetime import timedelta
from accelerate_cpp._native import create_backend
try:
    create_backend(dist.HashStore(), 0, 1, timedelta(minutes=1)).communicator.shared_empty({shape}, torch.float32)
except Exception as error:
    print(type(error).__name__, error)
"""
    # In a process of its own, which memory errors may end.
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"ended with {result.returncode}"
    assert result.stdout, "nothing was raised"


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


def test_python_goes_on_while_a_rank_waits() -> None:
    # Without releasing the interpreter lock, no second thread could become the other rank.
    assert run_ranks(2, lambda backend: backend.barrier().wait()) == [True, True]


def test_the_instructions_in_use_have_a_name() -> None:
    assert reduce_instruction_set() in {"avx512", "avx2", "portable"}
