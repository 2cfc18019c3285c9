"""Where autograd has no gradient for a parameter on a rank, that rank counts with zero, as in torch's wrapper.

Through the process group that sums gradients as on accelerators, too, and through a communication hook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from processes import run_processes
from scenarios import Ranks, Scenarios, compare_passes, compare_training

SCENARIOS = Scenarios()


def run_scenarios(through_group: bool) -> dict[str, str]:
    return SCENARIOS.run(through_group)


@pytest.fixture(scope="module", params=[(2, False), (3, False), (2, True)], ids=str)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    size, through_group = request.param
    return run_processes(run_scenarios, size, through_group)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    found = [failure[name] for failure in failures if name in failure]
    assert not found, "\n".join(found)


def layer(leaves_out: Any) -> Any:
    """A linear layer whose backward pass has no gradient for the weight while ``leaves_out()``."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, batch: Any, weight: Any) -> Any:
            ctx.save_for_backward(batch, weight)
            return batch @ weight.t()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            batch, weight = ctx.saved_tensors
            return gradient @ weight, None if leaves_out() else gradient.t() @ batch

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 6))
            self.after = torch.nn.Linear(3, 3)

        def forward(self, batch: Any) -> Any:
            return self.after(Product.apply(batch, self.weight))

    return Layer()


@SCENARIOS.add
def a_weight_for_which_one_rank_has_no_gradient_from_the_third_step_on(ranks: Ranks) -> None:
    step = [0]
    ours, theirs = ranks.pair(lambda: layer(lambda: ranks.rank == 1 and step[0] >= 2))

    def loss(model: Any, number: int) -> Any:
        step[0] = number
        return model(ranks.batch(number, 8, 6)).pow(2).mean()

    compare_training(ours, theirs, loss, steps=6)


@SCENARIOS.add
def through_a_communication_hook(ranks: Ranks) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    step = [0]
    ours, theirs = ranks.pair(lambda: layer(lambda: ranks.rank == 0 and step[0] == 2))
    for model in (ours, theirs):
        model.register_comm_hook(None, allreduce_hook)

    def loss(model: Any, number: int) -> Any:
        step[0] = number
        return model(ranks.batch(number, 8, 6)).pow(2).mean()

    compare_training(ours, theirs, loss, steps=4)


@SCENARIOS.add
def after_local_passes_whose_gradients_still_count(ranks: Ranks) -> None:
    leaves_out = [False]
    ours, theirs = ranks.pair(lambda: layer(lambda: leaves_out[0]))

    def passes(model: Any, step: int) -> Iterator[None]:
        leaves_out[0] = False
        with model.no_sync():
            model(ranks.batch(step, 8, 6)).pow(2).mean().backward()
        leaves_out[0] = ranks.rank == 1
        model(ranks.batch(100 + step, 8, 6)).pow(2).mean().backward()
        yield

    compare_passes(ours, theirs, passes)


@SCENARIOS.add
def added_to_gradients_of_the_step_before(ranks: Ranks) -> None:
    leaves_out = [False]
    ours, theirs = ranks.pair(lambda: layer(lambda: leaves_out[0]))

    def passes(model: Any, step: int) -> Iterator[None]:
        for number in range(3):
            leaves_out[0] = ranks.rank == 1 and number > 0
            model(ranks.batch(10 * step + number, 8, 6)).pow(2).mean().backward()
            yield

    compare_passes(ours, theirs, passes)


@SCENARIOS.add
def of_a_parameter_that_is_frozen_between_forward_and_backward(ranks: Ranks) -> None:
    import torch

    ours, theirs = ranks.pair(
        lambda: torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    )

    def passes(model: Any, step: int) -> Iterator[None]:
        loss = model(ranks.batch(step, 8, 6)).pow(2).mean()
        weight = model.module[0].weight
        weight.requires_grad_(not (ranks.rank == 1 and step % 2 == 0 and step > 0))
        loss.backward()
        weight.requires_grad_(True)
        yield

    compare_passes(ours, theirs, passes, steps=6)
