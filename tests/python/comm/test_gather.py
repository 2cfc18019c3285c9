"""Gathering with one rank. (tests/distributed/test_operations_of_batches.py gathers among processes.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp.comm import gather
from accelerate_cpp.comm.backend import register


@pytest.fixture(autouse=True, params=["gloo", "shm"])
def _group(request: pytest.FixtureRequest) -> Iterator[None]:
    register()
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64]
SHAPES = [(), (1,), (3, 2), (0, 4), (3, 0), (30_000,), (2, 20_000)]


def test_each_shape_and_dtype_comes_back() -> None:
    tensors = [torch.ones(shape).to(dtype) for dtype in DTYPES for shape in SHAPES]
    for gathered, tensor in zip(gather.all_gather(tensors), tensors, strict=True):
        assert gathered.dtype == tensor.dtype
        assert torch.equal(gathered, tensor.reshape(1) if tensor.ndim == 0 else tensor)


def test_results_are_new_tensors_without_gradients() -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.ones(30_000, requires_grad=True), torch.ones(4, 3).t()]
    for gathered, tensor in zip(gather.all_gather(tensors), tensors, strict=True):
        assert not gathered.requires_grad
        assert gathered.data_ptr() != tensor.data_ptr()
        assert torch.equal(gathered, tensor)


def test_nothing_can_be_gathered() -> None:
    assert gather.all_gather([]) == []


@pytest.mark.parametrize("length", [0, 8000, 9000, 1_000_000])
def test_objects_of_any_length_come_back(length: int) -> None:
    assert gather.all_gather_object({"text": "x" * length}) == [{"text": "x" * length}]
