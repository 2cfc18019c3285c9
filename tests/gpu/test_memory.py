"""Memory of the GPU: giving it back, and finding what fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accelerate_cpp import Accelerator, find_executable_batch_size
from accelerate_cpp.utils import clear_device_cache, release_memory

SAMPLE = 16 << 20  # bytes
LIMIT = 40 * SAMPLE
WORKSPACE = 64 << 20  # what cuBLAS may keep for itself, through torch's allocator


def test_released_memory_is_free_and_goes_back_to_the_driver_when_the_cache_is_cleared() -> None:
    clear_device_cache(garbage_collection=True)
    before = torch.cuda.memory_allocated()
    large = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    free, _ = torch.cuda.mem_get_info()
    (large,) = release_memory(large)
    assert large is None
    assert torch.cuda.memory_allocated() == before
    clear_device_cache()
    assert torch.cuda.mem_get_info()[0] >= free + (256 << 20)


def test_models_that_an_accelerator_has_let_go_leave_nothing_on_the_gpu() -> None:
    clear_device_cache(garbage_collection=True)
    before = torch.cuda.memory_allocated()
    accelerator = Accelerator()
    model = torch.nn.Linear(4096, 4096)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 4096, device=accelerator.device)).sum())
    optimizer.step()
    assert torch.cuda.memory_allocated() >= before + 4 * 4096 * 4096 * 4
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert torch.cuda.memory_allocated() <= before + (1 << 20) + WORKSPACE


@pytest.fixture
def _limited() -> Iterator[None]:
    """The allocator gives this process at most ``LIMIT`` bytes more than it has."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LIMIT) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("_limited")
def test_the_batch_size_is_one_that_fits_and_nine_tenths_of_one_that_did_not() -> None:
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        torch.zeros(batch_size, SAMPLE, dtype=torch.uint8, device="cuda")
        return batch_size

    found = train()
    assert found == tried[-1] <= 40 < tried[-2]
    assert found == int(tried[-2] * 0.9)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(tried[-2], SAMPLE, dtype=torch.uint8, device="cuda")
