"""DataParallel against torch's DistributedDataParallel over Gloo, in one, two and three real processes."""

from __future__ import annotations

import gc
import hashlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

TIMEOUT = timedelta(seconds=120)


@dataclass
class Ranks:
    """What a scenario gets: a shared-memory communicator of its own. Torch's default group is Gloo."""

    rank: int
    size: int
    communicator: Any

    def wrap(self, module: Any, **options: Any) -> Any:
        from accelerate_cpp.parallel.data_parallel import DataParallel

        return DataParallel(module, self.communicator, TIMEOUT, **options)

    def pair(self, make: Callable[[], Any], options: dict[str, Any] | None = None, **ddp: Any) -> tuple[Any, Any]:
        """The same model in our wrapper and in torch's. Ranks start with different weights: those of rank 0 must win."""
        import torch

        torch.manual_seed(self.rank)
        ours = self.wrap(make(), **(options or {}))
        torch.manual_seed(self.rank)
        return ours, torch.nn.parallel.DistributedDataParallel(make(), **ddp)

    def batch(self, step: int, *shape: int) -> Any:
        """Another one on every rank and in every step."""
        import torch

        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + self.rank))


Scenario = Callable[[Ranks], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Called on every rank; its name is the sentence that must hold."""
    SCENARIOS[function.__name__] = function
    return function


def run_scenarios() -> dict[str, str]:
    """The traceback of every scenario that failed on this rank."""
    import torch.distributed as dist

    from accelerate_cpp._native import create_backend

    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, size = dist.get_rank(), dist.get_world_size()
    failures = {}
    for name, function in SCENARIOS.items():
        store = dist.PrefixStore(name, dist.group.WORLD.store)
        try:
            function(Ranks(rank, size, create_backend(store, rank, size, TIMEOUT).communicator))
        except Exception:
            failures[name] = traceback.format_exc()
        dist.barrier()
    dist.destroy_process_group()
    return failures


@pytest.fixture(scope="module", params=[1, 2, 3])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    assert [rank_failures.get(name, "") for rank_failures in failures] == [""] * len(failures)


def same_gradients(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    import torch

    for (name, own), other in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), f"{name}: {own.grad} where torch has {other.grad}"
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


def compare_training(ours: Any, theirs: Any, loss: Callable[[Any, int], Any], steps: int = 4) -> None:
    """Trains both and compares gradients after every backward pass and all state at the end."""
    import torch

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (ours, theirs)]
    for step in range(steps):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            loss(model, step).backward()
        same_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    for own, other in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


@scenario
def an_mlp_trains_as_with_torch(ranks: Ranks) -> None:
    compare_training(*ranks.pair(mlp), lambda model, step: model(ranks.batch(step, 8, 6)).pow(2).mean(), steps=20)


@scenario
def a_model_of_many_buckets_trains_as_with_torch(ranks: Ranks) -> None:
    from torch import nn

    def make() -> Any:
        return nn.Sequential(nn.Linear(6, 700), *[nn.Linear(700, 700) for _ in range(4)], nn.Linear(700, 1))

    ours, theirs = ranks.pair(make, {"bucket_cap_mb": 2}, bucket_cap_mb=2)
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 6)).sin().mean())
    assert len(ours._reducer.bucket_sizes_bytes) == 5
    assert max(ours._reducer.bucket_sizes_bytes) <= 2 << 20


@scenario
def batch_norm_statistics_follow_rank_0_as_with_torch(ranks: Ranks) -> None:
    import torch
    from torch import nn

    def make() -> Any:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))

    def loss(model: Any, step: int) -> Any:
        return (model(ranks.batch(step, 4, 1, 8, 8)) * (step + 1)).sin().mean()

    ours, theirs = ranks.pair(make)
    compare_training(ours, theirs, loss)
    for model in (ours, theirs):
        model.eval()
        with torch.no_grad():
            model(ranks.batch(9, 4, 1, 8, 8))
    for own, other in zip(ours.module.buffers(), theirs.module.buffers(), strict=True):
        torch.testing.assert_close(own, other)


@scenario
def buffers_stay_local_when_asked(ranks: Ranks) -> None:
    import torch

    def make() -> Any:
        norm = torch.nn.BatchNorm1d(3)
        norm.running_mean.fill_(ranks.rank)
        return norm

    model = ranks.wrap(make(), broadcast_buffers=False)
    assert model.module.running_mean.tolist() == [ranks.rank] * 3
    model = ranks.wrap(make())
    assert model.module.running_mean.tolist() == [0] * 3


@scenario
def tied_weights_are_averaged_once(ranks: Ranks) -> None:
    from torch import nn

    def make() -> Any:
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5))
        model[2].weight = model[0].weight
        return model

    compare_training(*ranks.pair(make), lambda model, step: model(ranks.batch(step, 4, 5)).pow(2).mean())


def branches(ranks: Ranks) -> tuple[Any, Any]:
    """A model of three branches, called with the numbers of those it is to use."""
    from torch import nn

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, data: Any, used: list[int]) -> Any:
            return sum(self.parts[index](data) for index in used)

    return ranks.pair(Branches, find_unused_parameters=True)


@scenario
def a_parameter_unused_on_some_ranks_gets_the_average_and_one_unused_on_all_gets_none(ranks: Ranks) -> None:
    ours, theirs = branches(ranks)
    used = [0, 2] if ranks.rank == 0 else [0]
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4), used).pow(2).mean())
    assert ours.module.parts[2].weight.grad.abs().sum() > 0
    assert ours.module.parts[1].weight.grad is None


@scenario
def the_parameters_in_use_may_change_from_step_to_step(ranks: Ranks) -> None:
    ours, theirs = branches(ranks)
    compare_training(
        ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4), [(step + ranks.rank) % 3]).mean(), steps=8
    )


@scenario
def frozen_parameters_stay_out(ranks: Ranks) -> None:
    def make() -> Any:
        model = mlp()
        model[2].requires_grad_(False)
        return model

    ours, theirs = ranks.pair(make)
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 8, 6)).pow(2).mean())
    assert ours.module[2].weight.grad is None


@scenario
def float32_and_float64_may_be_mixed(ranks: Ranks) -> None:
    from torch import nn

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.single, self.double = nn.Linear(4, 4), nn.Linear(4, 1, dtype=__import__("torch").float64)

        def forward(self, data: Any) -> Any:
            return self.double(self.single(data).double())

    compare_training(*ranks.pair(Mixed), lambda model, step: model(ranks.batch(step, 4, 4)).pow(2).mean())


@scenario
def bfloat16_gradients_are_rounded_once(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    model = ranks.wrap(torch.nn.Linear(64, 8, dtype=torch.bfloat16))
    plain = torch.nn.Linear(64, 8, dtype=torch.bfloat16)
    plain.load_state_dict(model.module.state_dict())
    for wrapped in (model, plain):
        wrapped(ranks.batch(0, 4, 64).bfloat16()).float().pow(2).sum().backward()
    for own, local in zip(model.module.parameters(), plain.parameters(), strict=True):
        total = local.grad.float()
        dist.all_reduce(total)
        torch.testing.assert_close(own.grad, (total / ranks.size).bfloat16(), rtol=2**-8, atol=0)


@scenario
def accumulation_with_no_sync_equals_torchs(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(mlp)
    for step in range(3):
        for model in (ours, theirs):
            model.zero_grad()
            with model.no_sync():
                for part in range(2):
                    model(ranks.batch(10 * step + part, 4, 6)).pow(2).mean().backward()
        same_gradients(ours, theirs)
        for model in (ours, theirs):
            model(ranks.batch(10 * step + 9, 4, 6)).pow(2).mean().backward()
        same_gradients(ours, theirs)


@scenario
def synchronised_backward_passes_add_up(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(mlp)
    for step in range(3):
        for model in (ours, theirs):
            model(ranks.batch(step, 4, 6)).pow(2).mean().backward()
        same_gradients(ours, theirs)


@scenario
def the_forward_pass_decides_whether_gradients_stay_local(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(mlp)
    for model in (ours, theirs):
        with model.no_sync():
            loss = model(ranks.batch(0, 4, 6)).pow(2).mean()
        loss.backward()
    same_gradients(ours, theirs)
    for model in (ours, theirs):
        model.zero_grad()
        loss = model(ranks.batch(1, 4, 6)).pow(2).mean()
        with model.no_sync():
            loss.backward()
    same_gradients(ours, theirs)


@scenario
def synchronisation_can_be_switched_on_before_backward(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(mlp)
    for model in (ours, theirs):
        with model.no_sync():
            loss = model(ranks.batch(0, 4, 6)).pow(2).mean()
        model.reducer.prepare_for_backward([])
        loss.backward()
    same_gradients(ours, theirs)


@scenario
def evaluation_and_autograd_grad_do_not_disturb(ranks: Ranks) -> None:
    import torch

    ours, theirs = ranks.pair(mlp)

    def loss(model: Any, step: int) -> Any:
        value = model(ranks.batch(step, 4, 6)).pow(2).mean()
        with torch.no_grad(), ours.no_sync():
            ours(ranks.batch(50 + ranks.rank, 2, 6))
        if ranks.rank == 0:
            torch.autograd.grad(ours.module(ranks.batch(60, 2, 6)).sum(), list(ours.parameters()))
        return value

    compare_training(ours, theirs, loss)


@scenario
def checkpointing_without_reentry_changes_nothing(ranks: Ranks) -> None:
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, data: Any) -> Any:
            for part in self.parts:
                data = checkpoint(part, data, use_reentrant=False).tanh()
            return data

    compare_training(*ranks.pair(Checkpointed), lambda model, step: model(ranks.batch(step, 4, 4)).mean())


@scenario
def buckets_follow_the_order_in_which_gradients_arrive(ranks: Ranks) -> None:
    from torch import nn

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(64, 4), nn.Linear(4, 64)

        def forward(self, data: Any) -> Any:
            return self.last(self.first(data).tanh())

    # The head, used last and registered first, arrives first: 64 x 4 and 4 (padded to 16) floats before the others.
    ours, theirs = ranks.pair(Reversed, {"bucket_cap_mb": (1024 + 64) / (1 << 20)})
    before = ours._reducer.bucket_sizes_bytes
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4)).mean(), steps=1)
    after = ours._reducer.bucket_sizes_bytes
    assert (before, after) == ([1280, 1088][:1] * 0 + before, [1088, 1024, 256]) or after[0] == 1088, (before, after)
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4)).mean())
