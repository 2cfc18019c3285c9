"""Shared tensors as the C++ module makes them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import create_backend, create_segment, is_shared_tensor, shared_empty


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("shape", "dtype"), [([], torch.float64), ([3], torch.bool), ([2, 0], torch.float32), ([300, 1000], torch.bfloat16)]
)
def test_shared_tensors_have_the_shape_and_dtype_asked_for_and_work_in_collectives(
    size: int, shape: list[int], dtype: torch.dtype
) -> None:
    store = dist.HashStore()

    def total(rank: int) -> torch.Tensor:
        backend = create_backend(store, rank, size, timedelta(minutes=1))
        tensor = shared_empty(shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.count_nonzero() == 0
        tensor.fill_(1)
        backend.allreduce([tensor]).wait()
        return tensor.clone()

    with ThreadPoolExecutor(size) as threads:
        for result in threads.map(total, range(size)):
            assert torch.equal(result, torch.full(shape, size, dtype=torch.float64).to(dtype))
            assert result.dtype == dtype


def test_a_shared_tensor_outlives_every_group_that_used_it() -> None:
    tensor = shared_empty(size=[1000], dtype=torch.float32).fill_(7)
    for _ in range(2):
        backend = create_backend(dist.HashStore(), 0, 1, timedelta(minutes=1))
        backend.allreduce([tensor]).wait()
        del backend
        gc.collect()
    assert tensor.sum().item() == 7000
    assert not is_shared_tensor(tensor=tensor.clone())


def test_a_segment_is_a_file_that_goes_with_it() -> None:
    before = set(os.listdir("/proc/self/fd"))
    segment = create_segment(size_bytes=100)
    memory = torch.frombuffer(segment, dtype=torch.uint8)
    assert memory.count_nonzero() == 0
    memory[7] = 3
    assert os.fstat(segment.descriptor).st_size == memory.numel() >= 100
    assert os.pread(segment.descriptor, 1, 7) == b"\3"
    del segment, memory
    assert set(os.listdir("/proc/self/fd")) == before


def test_shapes_that_cannot_be_are_refused() -> None:
    script = """
import torch
from accelerate_cpp._native import shared_empty
for shape in [-1], [2, -3], [1 << 62], [1 << 40, 1 << 40]:
    try:
        shared_empty(shape, torch.float32)
    except Exception as error:
        print(type(error).__name__, str(error).replace("\\n", " "))
"""
    # In a process of its own, which memory errors may end.
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, f"ended with {result.returncode}"
    assert len(result.stdout.splitlines()) == 4, result.stdout
