"""Releasing memory, and finding a batch size that fits, in one process."""

from __future__ import annotations

import gc
import inspect
import logging
import weakref

import accelerate.utils.memory as original
import pytest
import torch

import accelerate_cpp
from accelerate_cpp.utils import memory

pytestmark = pytest.mark.usefixtures("quick_collections")

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("tried to allocate 2.00 TiB"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 TiB"),
    RuntimeError("XPU out of memory. Tried"),
    RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: can't allocate memory: you tried"),
    RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1"),
]
OTHERS = [RuntimeError("shapes differ"), RuntimeError(), RuntimeError("CUDA out of memory.", 1), ValueError("x")]


def limited(limit, error=None, **options):
    """A function that runs out of memory above ``limit``, and the sizes that it was tried with."""
    tried = []

    @accelerate_cpp.find_executable_batch_size(**options)
    def train(batch_size, *args, **kwargs):
        """Trains."""
        tried.append(batch_size)
        if batch_size > limit:
            raise error or RuntimeError("CUDA out of memory.")
        return batch_size, args, kwargs

    return train, tried


@pytest.mark.parametrize(
    "name", ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]
)
def test_parameters_are_those_of_the_original(name):
    def shape(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shape(getattr(memory, name)) == shape(getattr(original, name))


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_what_says_that_memory_is_exhausted(error):
    assert memory.should_reduce_batch_size(error)
    train, tried = limited(100, error)
    assert train() == (92, (), {})
    assert tried == [128, 115, 103, 92]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_pass_through(error):
    assert not memory.should_reduce_batch_size(error)
    train, tried = limited(100, error)
    with pytest.raises(type(error)) as raised:
        train()
    assert raised.value is error
    assert tried == [128]


def test_a_real_allocation_that_is_too_large_is_tried_smaller():
    @accelerate_cpp.find_executable_batch_size(starting_batch_size=2**58, reduce_batch_size_fn=lambda: 16)
    def allocate(batch_size):
        return torch.empty(batch_size, dtype=torch.uint8).numel()

    assert allocate() == 16


def test_arguments_and_documentation_are_the_functions_own():
    train, _ = limited(4, starting_batch_size=4)
    assert train("a", key="b") == (4, ("a",), {"key": "b"})
    assert train.__name__ == "train"
    assert train.__doc__ == "Trains."


def test_a_size_that_was_too_large_is_not_tried_again():
    train, tried = limited(7, starting_batch_size=8)
    assert (train()[0], train()[0]) == (7, 7)
    assert tried == [8, 7, 7]


def test_sizes_can_be_reduced_by_a_function():
    sizes = iter([32, 8])
    train, tried = limited(10, reduce_batch_size_fn=lambda: next(sizes))
    assert train()[0] == 8
    assert tried == [128, 32, 8]


def test_no_size_is_left():
    train, tried = limited(0, starting_batch_size=2)
    with pytest.raises(RuntimeError, match="No executable batch size found, reached zero"):
        train()
    assert tried == [2, 1]


def test_the_batch_size_is_not_the_callers_to_pass():
    @accelerate_cpp.find_executable_batch_size
    def train(batch_size, model):
        return batch_size

    with pytest.raises(TypeError, match=r"Batch size was passed into `train`.*call `train\(model=m\)`"):
        train(8, "m")


def test_each_smaller_size_is_logged(caplog):
    train, _ = limited(7, starting_batch_size=8)
    with caplog.at_level(logging.WARNING, "accelerate_cpp"):
        train()
    assert [record.getMessage() for record in caplog.records] == ["train ran out of memory with batch_size=8; trying 7"]


def test_what_a_failed_try_held_is_gone_in_the_next():
    held = []

    @accelerate_cpp.find_executable_batch_size(starting_batch_size=2)
    def train(batch_size):
        assert all(tensor() is None for tensor in held)
        tensor = torch.empty(1)
        held.append(weakref.ref(tensor))
        if batch_size > 1:
            raise torch.OutOfMemoryError("too large")

    train()
    assert len(held) == 2


def test_released_objects_are_gone():
    class Cyclic:
        def __init__(self):
            self.own = self
            self.tensor = torch.empty(1)

    gc.disable()
    try:
        first, second = Cyclic(), torch.empty(1)
        references = weakref.ref(first), weakref.ref(second)
        first, second = memory.release_memory(first, second)
        assert (first, second) == (None, None)
        memory.release_memory()
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
    assert memory.release_memory(1, 2) == [None, None]
