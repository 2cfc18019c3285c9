"""Processes that a rank forks after it has joined a group: they disturb nobody, and may not take part."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from faults import Raised, await_event, connect, job_folder, meet, raised_by, rank, run_job, tell

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.


def in_child(function: Callable[[], Any]) -> Any:
    """What ``function`` returns in a forked child, which then ends at once."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "wb") as file:
            pickle.dump(raised_by(function), file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    return pickle.loads(answer)


def use_the_group_in_a_child() -> dict[str, Raised]:
    import torch

    dist = connect()
    dist.all_reduce(torch.ones(3), async_op=True).wait()  # so that there is a queue with a thread

    uses: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(3)),
        "large all_reduce": lambda: dist.all_reduce(torch.ones(1 << 20)),
        "asynchronous": lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        "barrier": lambda: dist.barrier(),
        "send": lambda: dist.send(torch.ones(3), 1 - rank()),
        "receive": lambda: dist.recv(torch.ones(3), 1 - rank()),
        "object": lambda: dist.all_gather_object([None, None], "anything"),
    }
    raised = {name: in_child(use) for name, use in uses.items()}
    for use in (uses["all_reduce"], uses["asynchronous"], uses["large all_reduce"]):
        use()
    return raised


def test_a_forked_child_is_told_that_the_group_did_not_come_along_and_the_parent_goes_on() -> None:
    for outcomes in run_job(use_the_group_in_a_child, 2):
        for name, raised in outcomes.items():
            assert raised.kind == "InvalidArgument", (name, raised)
            assert "create a new group in the child" in raised.message, name


def train_in_a_child() -> dict[str, Raised]:
    import torch

    from accelerate_cpp import Accelerator

    connect()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(3, 3))
    pending = model(torch.ones(2, 3)).sum()

    def train() -> None:
        accelerator.backward(model(torch.ones(2, 3)).sum())

    def train_alone() -> None:
        with accelerator.no_sync(model):
            train()

    train()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    raised = {"synchronised": in_child(train), "local": in_child(train_alone)}
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    # Autograd has added to the gradients by the time that the reducer hears of this one.
    raised["begun before the fork"] = in_child(lambda: accelerator.backward(pending))
    accelerator.backward(pending)
    return raised


def test_a_forked_child_that_would_write_into_the_gradients_of_its_parent_is_refused() -> None:
    for outcomes in run_job(train_in_a_child, 2):
        for name, raised in outcomes.items():
            assert raised.kind == "InvalidArgument", (name, raised)
            assert "forked off after the model was prepared" in raised.message, name


def child_ends(how: str) -> float:
    """The child of every rank ends while the ranks go on."""
    import torch

    dist = connect()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    child = os.fork()
    if child == 0:
        if how == "by exit":
            sys.exit(0)
        if how == "by destroying the group":
            dist.destroy_process_group()
            os._exit(0)
        del dist, work
        raise SystemExit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    data = torch.ones(1000)
    dist.all_reduce(data)
    dist.all_reduce(data, async_op=True).wait()
    return data.mean().item()


@pytest.mark.parametrize("how", ["by exit", "by destroying the group", "by an exception"])
def test_the_end_of_a_forked_child_is_not_that_of_its_rank(how: str) -> None:
    assert run_job(child_ends, 2, how, finalize=True) == [4.0, 4.0]


def fork_in_the_middle() -> float:
    """A child is forked while its parent's queue works on an operation that rank 1 has not joined."""
    import torch

    dist = connect()
    data = torch.ones(1 << 20)
    if rank() == 1:
        await_event("forked", 0)
        dist.all_reduce(data)
        return data.mean().item()
    work = dist.all_reduce(data, async_op=True)
    message = torch.zeros(3)
    receiving = dist.irecv(message, 1)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    tell("forked")
    work.wait()
    assert receiving is not None
    return data.mean().item()


def test_a_fork_in_the_middle_of_an_operation_does_not_disturb_it() -> None:
    assert run_job(fork_in_the_middle, 2) == [2.0, 2.0]


def group_of_children() -> float:
    """The children of the ranks form a group of their own, beside that of their parents."""
    import torch

    dist = connect()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        dist.destroy_process_group()
        store = dist.FileStore(str(job_folder() / "store of the children"), 2)
        dist.init_process_group("cpu:shm", store=store, rank=rank(), world_size=2)
        data = torch.full((100_000,), 10.0 + rank())
        dist.all_reduce(data)
        os.write(writing, str(data.mean().item()).encode())
        os._exit(0)
    data = torch.full((100_000,), float(rank()))
    dist.all_reduce(data)
    assert data.mean() == 1
    os.waitpid(child, 0)
    return float(os.read(reading, 100))


def test_children_may_form_a_group_of_their_own() -> None:
    assert run_job(group_of_children, 2) == [21.0, 21.0]


def train_with_workers(persistent: bool) -> list[float]:
    """Loaders with two worker processes each, during training."""
    import torch
    from torch.utils.data import DataLoader

    from accelerate_cpp import Accelerator

    dist = connect()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    loader = DataLoader(
        [torch.tensor([float(value)]) for value in range(16)],
        batch_size=2,
        num_workers=2,
        multiprocessing_context="fork",
        persistent_workers=persistent,
    )
    model, loader = accelerator.prepare(model, loader)
    seen = []
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            seen += accelerator.gather(batch).flatten().tolist()
    meet("trained")
    dist.barrier()
    return seen


@pytest.mark.parametrize("persistent", [False, True])
def test_training_with_loader_workers_leaves_nothing(persistent: bool) -> None:
    for seen in run_job(train_with_workers, 2, persistent, finalize=True):
        assert sorted(seen) == sorted([float(value) for value in range(16)] * 2)
