"""Tensors in shared memory as users make them."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import platform
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.multiprocessing

import accelerate_cpp
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.shared_memory import (
    is_shared,
    shared_empty,
    shared_empty_like,
    shared_full,
    shared_tensor,
    shared_zeros,
)

linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="processes share memory on Linux only")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
DTYPES += [torch.uint16, torch.float8_e4m3fn]


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("size", [((),), (3,), (2, 3), ([2, 3],), (torch.Size([4]),), (0,), (2, 0, 5)])
def test_sizes_are_written_as_for_torch_empty(size: tuple[object, ...]) -> None:
    assert shared_empty(*size).shape == torch.empty(*size).shape  # type: ignore[arg-type, call-overload]
    assert shared_zeros(*size).shape == torch.zeros(*size).shape  # type: ignore[arg-type, call-overload]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_have_the_dtype_asked_for_and_work_as_any_tensor(dtype: torch.dtype) -> None:
    tensor = shared_empty(4, 5, dtype=dtype)
    assert (tensor.dtype, tensor.device.type, tensor.is_contiguous()) == (dtype, "cpu", True)
    tensor.copy_(torch.ones(4, 5))
    assert tensor.to(torch.complex64).sum() == 20


def test_float32_is_the_default() -> None:
    assert shared_empty(2).dtype == shared_zeros(2).dtype == torch.float32


def test_zeros_are_zero_even_where_something_else_was() -> None:
    for _ in range(3):
        shared_full((1000,), 7.0)
        gc.collect()
        assert shared_zeros(1000).count_nonzero() == 0


@pytest.mark.parametrize("value", [True, 3, 2.5, float("nan")])
def test_full_takes_the_dtype_that_torch_full_takes(value: float) -> None:
    made, expected = shared_full((2, 3), value), torch.full((2, 3), value)
    assert made.dtype == expected.dtype
    torch.testing.assert_close(made, expected, equal_nan=True)
    assert shared_full([2], value, dtype=torch.float64).dtype == torch.float64


def test_empty_like_has_the_shape_and_dtype_of_its_model_but_is_contiguous() -> None:
    model = torch.ones(3, 4, dtype=torch.float16).t()
    made = shared_empty_like(model)
    assert (made.shape, made.dtype, made.is_contiguous()) == (model.shape, torch.float16, True)
    assert shared_empty_like(model, dtype=torch.int32).dtype == torch.int32


@pytest.mark.parametrize(
    "data", [[[1, 2], [3, 4]], 2.5, True, np.arange(6).reshape(2, 3), torch.arange(6.0).view(2, 3).t()]
)
def test_a_shared_tensor_is_a_copy_of_its_data(data: object) -> None:
    made = shared_tensor(data)
    torch.testing.assert_close(made, torch.as_tensor(data))
    made.fill_(0)
    assert not isinstance(data, torch.Tensor) or data.sum() == 15
    assert shared_tensor(data, dtype=torch.float64).dtype == torch.float64


def test_a_copy_has_no_history() -> None:
    source = torch.ones(2, requires_grad=True)
    assert not shared_tensor(source * 2).requires_grad
    assert shared_tensor(source, requires_grad=True).is_leaf


def test_sparse_data_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"torch\.sparse_coo; call \.to_dense"):
        shared_tensor(torch.eye(3).to_sparse())


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no dimension of size -1"):
        shared_empty(2, -1)


def test_autograd_works_on_them() -> None:
    for make in (shared_empty, shared_zeros):
        leaf = make(3, requires_grad=True)
        assert leaf.is_leaf
        (leaf * 2).sum().backward()
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2, 2, 2]
    assert shared_full((2,), 1.0, requires_grad=True).requires_grad
    assert shared_empty_like(torch.ones(2), requires_grad=True).requires_grad


@linux_only
def test_views_lie_in_shared_memory_and_copies_do_not() -> None:
    tensor = shared_empty(4, 5)
    for view in (tensor, tensor[1], tensor.t(), tensor.view(torch.uint8), tensor.detach(), tensor.numpy()):
        assert is_shared(torch.as_tensor(view))
    for other in (torch.empty(4), tensor.clone(), tensor + 1, tensor.to_sparse(), tensor.to("meta")):
        assert not is_shared(other)
    assert not tensor.is_shared(), "torch.multiprocessing has nothing to do with it"


def saved_and_loaded(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


@pytest.mark.parametrize("duplicate", [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy, saved_and_loaded])
def test_a_pickled_or_copied_tensor_is_an_ordinary_one(duplicate: object) -> None:
    tensor = shared_full((3,), 4.0)
    other = duplicate(tensor)  # type: ignore[operator]
    assert other.tolist() == [4, 4, 4]
    assert not is_shared(other)


@linux_only
def test_the_memory_is_freed_with_the_last_view() -> None:
    size_bytes = 64 << 20
    before = resident_bytes()
    tensor = shared_zeros(size_bytes, dtype=torch.uint8)
    tensor.fill_(1)
    row = tensor[:10]
    del tensor
    gc.collect()
    assert resident_bytes() - before > size_bytes // 2
    assert row.sum() == 10
    del row
    gc.collect()
    assert resident_bytes() - before < size_bytes // 2


@linux_only
def test_a_forked_child_shares_them() -> None:
    tensor = shared_zeros(3)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: tensor.fill_(5))
    child.start()
    child.join()
    assert tensor.tolist() == [5, 5, 5]


@linux_only
def test_sending_one_to_another_process_moves_it_out() -> None:
    tensor = shared_full((3,), 4.0)
    ForkingPickler.dumps(tensor)  # as torch.multiprocessing's queues and pipes do
    assert tensor.tolist() == [4, 4, 4]
    assert not is_shared(tensor)


def test_storages_cannot_be_resized() -> None:
    tensor = shared_empty(4)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.resize_(100)


def test_the_functions_are_names_of_the_package() -> None:
    names = ("is_shared", "shared_empty", "shared_empty_like", "shared_full", "shared_tensor", "shared_zeros")
    for name in names:
        assert getattr(accelerate_cpp, name).__module__ == "accelerate_cpp.shared_memory"
        assert name in accelerate_cpp.__all__
