"""Processes that look for a batch size that fits find the same one, wherever one of them ran out of memory."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes, start_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

FAILING = 1  # the rank
START, FITS = 40, 30  # 40 -> 36 -> 32 -> 28


def training(fails_in: str, error: str = "OutOfMemoryError") -> tuple[Any, list[int], Any]:
    """A function that trains and, above the size that fits, fails on one rank: in its forward or backward pass, or
    after it; the sizes that it was tried with; and the Accelerator.
    """
    import torch
    from torch import nn

    from accelerate_cpp import Accelerator, find_executable_batch_size

    accelerator = Accelerator(cpu=True)
    tried: list[int] = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, data: Any, batch_size: int) -> Any:
            context.batch_size = batch_size
            return data.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            fail_at("backward", context.batch_size)
            return gradient, None

    def fail_at(place: str, batch_size: int) -> None:
        if place == fails_in and batch_size > FITS and accelerator.process_index == FAILING:
            raise torch.OutOfMemoryError("too much") if error == "OutOfMemoryError" else ValueError("unrelated")

    @find_executable_batch_size(starting_batch_size=START)
    def train(batch_size: int) -> tuple[int, float]:
        accelerator.free_memory()
        tried.append(batch_size)
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for step in range(3):
            data = model(torch.ones(batch_size, 4) * (accelerator.process_index + 1))
            if step == 1:
                fail_at("forward", batch_size)
                data = Fails.apply(data, batch_size)
            optimizer.zero_grad()
            accelerator.backward(data.pow(2).mean())
            optimizer.step()
            if fails_in != "at the end":
                accelerator.gather(torch.tensor([step]))
        fail_at("at the end", batch_size)
        return batch_size, float(sum(parameter.detach().sum() for parameter in model.parameters()))

    return train, tried, accelerator


def search(fails_in: str) -> tuple[Any, list[int]]:
    train, tried, accelerator = training(fails_in)
    found = train()
    assert train() == found
    accelerator.wait_for_everyone()
    return found, tried


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("fails_in", ["forward", "backward", "at the end"])
def test_all_go_on_with_the_same_size(fails_in: str, world_size: int) -> None:
    results = run_processes(search, world_size, fails_in)
    assert results == [results[0]] * world_size
    (batch_size, _), tried = results[0]
    assert batch_size == 28
    assert tried == [40, 36, 32, 28, 28]


def search_from_different_sizes() -> list[int]:
    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import find_executable_batch_size

    rank = Accelerator(cpu=True).process_index
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 6 - rank)
    def train(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 6:
            raise RuntimeError("CUDA out of memory.")

    train()
    return tried


def test_the_smallest_of_the_next_sizes_is_everyones() -> None:
    assert run_processes(search_from_different_sizes, 2) == [[8, 5], [8, 5]]


def reaches_zero() -> str:
    import torch

    from accelerate_cpp import Accelerator, find_executable_batch_size

    rank = Accelerator(cpu=True).process_index

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        if rank == FAILING:
            raise torch.OutOfMemoryError("too much")

    try:
        train()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_no_size_is_left_on_any_rank() -> None:
    assert all("reached zero" in message for message in run_processes(reaches_zero, 2))


def fails_otherwise(fails_in: str) -> tuple[str, str, list[int]]:
    train, tried, _ = training(fails_in, error="ValueError")
    try:
        train()
    except Exception as error:
        if isinstance(error, ValueError):
            raise
        return type(error).__name__, str(error), tried
    return "nothing", "was raised", tried


@pytest.mark.parametrize("fails_in", ["forward", "backward", "at the end"])
def test_another_error_is_raised_as_it_is_and_ends_the_others(fails_in: str) -> None:
    other, failing = start_processes(fails_otherwise, 2, fails_in)
    assert failing.exit_code == 1
    assert "ValueError: unrelated" in failing.stderr
    kind, text, tried = other.value
    assert (kind, tried) == ("PeerLost", [START]), text


def mismatch_without_memory_trouble() -> tuple[str, int]:
    import torch

    from accelerate_cpp import Accelerator, find_executable_batch_size

    accelerator = Accelerator(cpu=True)
    calls: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int) -> None:
        calls.append(batch_size)
        accelerator.gather(torch.ones(1 + accelerator.process_index))

    try:
        train()
    except Exception as error:
        raised = type(error).__name__
    accelerator.wait_for_everyone()
    return raised, len(calls)


def test_ranks_that_disagree_for_another_reason_raise_that() -> None:
    assert run_processes(mismatch_without_memory_trouble, 2) == [("MismatchedCollective", 1)] * 2
