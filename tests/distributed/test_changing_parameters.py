"""Parameters that are added, replaced, frozen or thawed after ``prepare`` are averaged when they require gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from processes import run_processes
from scenarios import TIMEOUT, Ranks, Scenarios, close

SCENARIOS = Scenarios()


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=[1, 2, 3])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    found = [failure[name] for failure in failures if name in failure]
    assert not found, "\n".join(found)


def two_layers(ranks: Ranks) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(ranks.rank)
    return ranks.wrap(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))


def averages_everything(ranks: Ranks, model: Any, steps: int = 2) -> None:
    """Gradients are those of the average over all ranks' batches, and only what requires one has one."""
    for step in range(steps):
        model.zero_grad()
        model(ranks.batch(step, 4, 6)).pow(2).sum().backward()
        plain = copy.deepcopy(model.module)
        plain.zero_grad()
        batches = [Ranks(rank, ranks.size, None).batch(step, 4, 6) for rank in range(ranks.size)]
        (sum(plain(batch).pow(2).sum() for batch in batches) / ranks.size).backward()
        for (name, own), reference in zip(model.module.named_parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (reference.grad is None) == (not own.requires_grad), name
            if own.grad is not None:
                close(own.grad, reference.grad, name, relative=1e-5)


@SCENARIOS.add
def thawed_before_the_first_step(ranks: Ranks) -> None:
    import torch
    from torch import nn

    torch.manual_seed(ranks.rank)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    model = ranks.wrap(module)
    model.module[0].requires_grad_(True)
    averages_everything(ranks, model)


@SCENARIOS.add
def frozen_and_thawed_between_steps(ranks: Ranks) -> None:
    model = two_layers(ranks)
    averages_everything(ranks, model)
    reducer = model._reducer
    for _ in range(2):
        model.module[0].requires_grad_(False)
        averages_everything(ranks, model)
        model.module[0].requires_grad_(True)
        averages_everything(ranks, model)
    assert model._reducer is reducer  # its buckets had room for them all the time


@SCENARIOS.add
def parts_that_are_trained_in_turns(ranks: Ranks) -> None:
    import torch
    from torch import nn

    torch.manual_seed(ranks.rank)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    model = ranks.wrap(module)
    for turn in range(4):
        model.module[0].requires_grad_(turn % 2 == 1)
        model.module[1].requires_grad_(turn % 2 == 0)
        averages_everything(ranks, model, steps=1)


@SCENARIOS.add
def added_as_a_module(ranks: Ranks) -> None:
    import torch
    from torch import nn

    model = two_layers(ranks)
    averages_everything(ranks, model)
    torch.manual_seed(100 + ranks.rank)  # other weights on every rank: those of rank 0 count
    model.module.append(nn.Linear(3, 2))
    averages_everything(ranks, model)


@SCENARIOS.add
def added_as_adapters_beside_a_frozen_base(ranks: Ranks) -> None:
    import torch
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base = base
            self.down, self.up = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 5))

        def forward(self, data: Any) -> Any:
            return self.base(data) + data @ self.down @ self.up

    model = two_layers(ranks)
    averages_everything(ranks, model)
    model.module.requires_grad_(False)
    model.module[0] = Adapted(model.module[0])
    averages_everything(ranks, model)


@SCENARIOS.add
def replaced_by_a_larger_one(ranks: Ranks) -> None:
    import torch
    from torch import nn

    model = two_layers(ranks)
    averages_everything(ranks, model)
    model.module[2].weight = nn.Parameter(torch.randn(7, 5))
    model.module[2].bias = nn.Parameter(torch.randn(7))
    averages_everything(ranks, model)


@SCENARIOS.add
def accumulated_before_it_was_added(ranks: Ranks) -> None:
    import torch
    from torch import nn

    model = two_layers(ranks)
    with model.no_sync():
        model(ranks.batch(0, 4, 6)).sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    model.module[1].extra = nn.Linear(1, 1)  # which nothing computes with
    model(ranks.batch(1, 4, 6)).sum().backward()
    plain = copy.deepcopy(model.module)
    expected = []
    for rank in range(ranks.size):
        peer = Ranks(rank, ranks.size, None)
        plain.zero_grad()
        (plain(peer.batch(0, 4, 6)).sum() + plain(peer.batch(1, 4, 6)).sum()).backward()
        expected.append([parameter.grad for parameter in plain.parameters() if parameter.grad is not None])
    assert len(kept) == len(expected[0])
    own = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient, *everyones in zip(own, *expected, strict=True):
        close(gradient, torch.stack(everyones).mean(0), "gradient", relative=1e-5)


@SCENARIOS.add
def a_communication_hook_serves_new_parameters_too(ranks: Ranks) -> None:
    from torch import nn

    calls = []

    def hook(state: Any, bucket: Any) -> Any:
        import torch
        import torch.distributed as dist

        calls.append(bucket.buffer().numel())
        ranks.communicator.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, TIMEOUT)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = two_layers(ranks)
    model.register_comm_hook(None, hook)
    averages_everything(ranks, model)
    seen = sum(calls[-1:])
    model.module.append(nn.Linear(3, 2))
    averages_everything(ranks, model)
    assert calls[-1] > seen
