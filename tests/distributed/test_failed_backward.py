"""A backward pass that fails on one rank fails on all of them at once, changes nothing, and the next one works."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from processes import run_processes
from test_peer_failures import connect, interrupt_when_in, interrupted_by

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

FAILING = 1  # the rank


def prepared(synchronises_inside: bool = False) -> tuple[Any, Any, Any, list[Callable[[], None]]]:
    """An accelerator, a model and an optimizer, and a list: what it holds is called in the next backward pass.

    Args:
        synchronises_inside: a collective takes place in the backward pass after that.
    """
    import torch
    from torch import nn

    from accelerate_cpp import Accelerator

    dist, _ = connect()
    to_do: list[Callable[[], None]] = []

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, data: Any) -> Any:
            return data.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            dist.all_reduce(torch.ones(1))
            return gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 40), nn.Linear(40, 4)

        def forward(self, data: Any) -> Any:
            data = self.body(data)
            if synchronises_inside:
                data = Reduced.apply(data)
            return self.head(interrupted_by(to_do.pop() if to_do else None)(data))

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator, model, optimizer, to_do


def loss_of(model: Any, rank: int, step: int) -> Any:
    import torch

    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))).pow(2).sum()


def trains_like_one_process(accelerator: Any, model: Any, optimizer: Any) -> None:
    """Three steps give the gradients of the average loss, and then equal weights."""
    import copy

    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    plain = copy.deepcopy(accelerator.unwrap_model(model))
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(loss_of(model, rank, step))
        plain.load_state_dict(accelerator.unwrap_model(model).state_dict())
        plain.zero_grad()
        (sum(loss_of(plain, peer, step) for peer in range(size)) / size).backward()
        for own, reference in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, reference.grad, rtol=1e-5, atol=1e-6)
        optimizer.step()
    for parameter in model.parameters():
        everyones = [torch.empty_like(parameter) for _ in range(size)]
        dist.all_gather(everyones, parameter.detach())
        assert all(torch.equal(one, everyones[0]) for one in everyones)


def raise_out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("tried to allocate 2.00 TiB")


def raise_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


FAILURES = {"OutOfMemoryError": raise_out_of_memory, "KeyboardInterrupt": raise_ctrl_c}


def fails_and_goes_on(kind: str, synchronises_inside: bool, plain_backward: bool) -> list[Any]:
    """The kinds and texts of what three failing passes raised here, each between steps that work."""
    import torch.distributed as dist

    accelerator, model, optimizer, to_do = prepared(synchronises_inside)
    found = []
    for _ in range(3):
        trains_like_one_process(accelerator, model, optimizer)
        if dist.get_rank() == FAILING:
            to_do.append(FAILURES[kind])
        loss = loss_of(model, dist.get_rank(), 0)
        optimizer.zero_grad()
        dist.barrier()
        try:
            loss.backward() if plain_backward else accelerator.backward(loss)
            found.append(("nothing", "was raised"))
        except BaseException as error:
            found.append((type(error).__name__, str(error)))
        assert all(parameter.grad is None for parameter in model.parameters())
    trains_like_one_process(accelerator, model, optimizer)
    return found


@pytest.mark.parametrize("plain_backward", [False, True], ids=["accelerator.backward", "loss.backward"])
@pytest.mark.parametrize("synchronises_inside", [False, True], ids=["", "beside_a_collective"])
@pytest.mark.parametrize(
    ("kind", "text"), [("OutOfMemoryError", "tried to allocate 2.00 TiB"), ("KeyboardInterrupt", "")]
)
def test_the_next_pass_works(kind: str, text: str, synchronises_inside: bool, plain_backward: bool) -> None:
    for rank, passes in enumerate(run_processes(fails_and_goes_on, 3, kind, synchronises_inside, plain_backward)):
        for found_kind, found_text in passes:
            assert found_kind == (kind if rank == FAILING else "PeerLost"), found_text
            if rank == FAILING:
                assert text in found_text
            else:
                reason = "its backward pass " + (
                    "ended in an exception" if plain_backward else f"raised {kind}: {text}"
                )
                assert f"rank {FAILING} withdrew: {reason}" in found_text


def interrupted_while_it_waits() -> tuple[str, str]:
    import torch.distributed as dist

    accelerator, model, optimizer, _ = prepared()
    store = dist.distributed_c10d._get_default_store()
    trains_like_one_process(accelerator, model, optimizer)
    loss = loss_of(model, dist.get_rank(), 0)
    raised = ("nothing", "was raised")
    if dist.get_rank() == FAILING:
        interrupt_when_in("backward_ended")
    else:
        store.wait(["interrupted"])
    try:
        accelerator.backward(loss)
    except BaseException as error:
        raised = type(error).__name__, str(error)
    if dist.get_rank() == FAILING:
        store.set("interrupted", "")
    trains_like_one_process(accelerator, model, optimizer)
    return raised


def test_ctrl_c_in_the_wait_for_the_others_does_not_end_the_group() -> None:
    first, interrupted = run_processes(interrupted_while_it_waits, 2)
    assert interrupted[0] == "KeyboardInterrupt"
    assert first[0] == "PeerLost"
    assert f"rank {FAILING} withdrew" in first[1]


def fails_without_synchronisation() -> tuple[list[Any], str]:
    import torch.distributed as dist

    accelerator, model, optimizer, to_do = prepared()
    rank = dist.get_rank()
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model, rank, 0))
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    raised = "nothing"
    with accelerator.no_sync(model):
        if rank == FAILING:
            to_do.append(raise_out_of_memory)
        try:
            accelerator.backward(loss_of(model, rank, 1))
        except Exception as error:
            raised = type(error).__name__
    if rank == FAILING:
        assert all(parameter.grad is not None for parameter in model.parameters())
    else:
        assert any(not own.grad.equal(before) for own, before in zip(model.parameters(), kept, strict=True))
    trains_like_one_process(accelerator, model, optimizer)
    return [], raised


def test_a_local_pass_that_fails_is_nobody_elses_affair() -> None:
    (_, other), (_, failing) = run_processes(fails_without_synchronisation, 2)
    assert other == "nothing"
    assert failing == "OutOfMemoryError"


def fails_in_forward() -> str:
    """Rank 1 goes to the next collective of the program while the others average: all raise, and go on."""
    import torch.distributed as dist

    accelerator, model, optimizer, _ = prepared()
    try:
        if dist.get_rank() != FAILING:
            accelerator.backward(loss_of(model, dist.get_rank(), 0))
        dist.barrier()
        raised = "nothing"
    except Exception as error:
        raised = type(error).__name__
    trains_like_one_process(accelerator, model, optimizer)
    return raised


def test_a_rank_that_never_came_to_its_backward_pass() -> None:
    assert run_processes(fails_in_forward, 3) == ["MismatchedCollective"] * 3
