"""DataParallel trains as torch's DistributedDataParallel over Gloo does, in one, two and three real processes."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes
from scenarios import Ranks, Scenarios, compare_training, same_gradients

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

SCENARIOS = Scenarios()


def run_scenarios() -> dict[str, str]:
    return SCENARIOS.run()


@pytest.fixture(scope="module", params=[1, 2, 3])
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_processes(run_scenarios, request.param)


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))


@SCENARIOS.add
def an_mlp_trains_as_with_torch(ranks: Ranks) -> None:
    compare_training(*ranks.pair(mlp), lambda model, step: model(ranks.batch(step, 8, 6)).pow(2).mean(), steps=20)


@SCENARIOS.add
def a_model_of_many_buckets_trains_as_with_torch(ranks: Ranks) -> None:
    from torch import nn

    def make() -> Any:
        return nn.Sequential(nn.Linear(6, 700), *[nn.Linear(700, 700) for _ in range(4)], nn.Linear(700, 1))

    ours, theirs = ranks.pair(make, {"bucket_cap_mb": 2}, bucket_cap_mb=2)
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 6)).sin().mean())
    assert len(ours._reducer.bucket_sizes_bytes) == 5
    assert max(ours._reducer.bucket_sizes_bytes) <= 2 << 20


@SCENARIOS.add
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


@SCENARIOS.add
def buffers_stay_local_when_asked(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    def make() -> Any:
        norm = torch.nn.BatchNorm1d(3)
        norm.running_mean.fill_(ranks.rank)
        return norm

    model = ranks.wrap(make(), broadcast_buffers=False)
    assert model.module.running_mean.tolist() == [ranks.rank] * 3
    model = ranks.wrap(make())
    assert model.module.running_mean.tolist() == [0] * 3
    dist.barrier()


@SCENARIOS.add
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


@SCENARIOS.add
def a_parameter_unused_on_some_ranks_gets_the_average_and_one_unused_on_all_gets_none(ranks: Ranks) -> None:
    ours, theirs = branches(ranks)
    used = [0, 2] if ranks.rank == 0 else [0]
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4), used).pow(2).mean())
    assert ours.module.parts[2].weight.grad.abs().sum() > 0
    assert ours.module.parts[1].weight.grad is None


@SCENARIOS.add
def the_parameters_in_use_may_change_from_step_to_step(ranks: Ranks) -> None:
    ours, theirs = branches(ranks)
    compare_training(
        ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4), [(step + ranks.rank) % 3]).mean(), steps=8
    )


@SCENARIOS.add
def frozen_parameters_stay_out(ranks: Ranks) -> None:
    def make() -> Any:
        model = mlp()
        model[2].requires_grad_(False)
        return model

    ours, theirs = ranks.pair(make)
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 8, 6)).pow(2).mean())
    assert ours.module[2].weight.grad is None


@SCENARIOS.add
def float32_and_float64_may_be_mixed(ranks: Ranks) -> None:
    from torch import nn

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1).double()

        def forward(self, data: Any) -> Any:
            return self.second(self.first(data).double())

    compare_training(*ranks.pair(Mixed), lambda model, step: model(ranks.batch(step, 4, 4)).pow(2).mean())


@SCENARIOS.add
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


@SCENARIOS.add
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


@SCENARIOS.add
def synchronised_backward_passes_add_up(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(mlp)
    for step in range(3):
        for model in (ours, theirs):
            model(ranks.batch(step, 4, 6)).pow(2).mean().backward()
        same_gradients(ours, theirs)


@SCENARIOS.add
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


@SCENARIOS.add
def synchronisation_can_be_switched_on_before_backward(ranks: Ranks) -> None:
    ours, theirs = ranks.pair(mlp)
    for model in (ours, theirs):
        with model.no_sync():
            loss = model(ranks.batch(0, 4, 6)).pow(2).mean()
        model.reducer.prepare_for_backward([])
        loss.backward()
    same_gradients(ours, theirs)


@SCENARIOS.add
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


@SCENARIOS.add
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


@SCENARIOS.add
def buckets_follow_the_order_in_which_gradients_arrive(ranks: Ranks) -> None:
    from torch import nn

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(64, 4), nn.Linear(4, 64)

        def forward(self, data: Any) -> Any:
            return self.last(self.first(data).tanh())

    # The head, registered first, has the first gradients. With padding: 1024 and 64 bytes; below it 1024 and 256.
    ours, theirs = ranks.pair(Reversed, {"bucket_cap_mb": (1024 + 64) / (1 << 20)})
    assert ours._reducer.bucket_sizes_bytes == [256, 1024 + 64, 1024]
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4)).mean(), steps=2)
    assert ours._reducer.bucket_sizes_bytes[0] == 1024 + 64
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 4, 4)).mean())


@SCENARIOS.add
def gradients_have_the_shapes_and_strides_of_parameters(ranks: Ranks) -> None:
    import torch
    from torch import nn

    class Shapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
            self.scalar = nn.Parameter(torch.randn(()))
            self.transposed = nn.Parameter(torch.randn(3, 5).t())
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, data: Any) -> Any:
            products = (self.image * data, self.scalar * data, self.transposed * data.mean(), self.empty)
            return sum(product.pow(2).sum() for product in products)

    ours, theirs = ranks.pair(Shapes, gradient_as_bucket_view=True)
    compare_training(ours, theirs, lambda model, step: model(ranks.batch(step, 2, 3, 4, 4)))
    for name, parameter in ours.module.named_parameters():
        assert parameter.grad.stride() == parameter.stride(), name


@SCENARIOS.add
def hooks_on_parameters_see_local_gradients_as_with_torch(ranks: Ranks) -> None:
    def make() -> Any:
        model = mlp()
        model[0].weight.register_hook(lambda gradient: gradient * (ranks.rank + 2))
        return model

    compare_training(*ranks.pair(make), lambda model, step: model(ranks.batch(step, 4, 6)).pow(2).mean())


@SCENARIOS.add
def one_backward_pass_may_go_through_two_models(ranks: Ranks) -> None:
    first, second = ranks.pair(mlp), ranks.pair(mlp)
    for step in range(3):
        for one, other in zip(first, second, strict=True):
            data = ranks.batch(step, 4, 6)
            (one(data).pow(2).mean() + other(data).sin().mean()).backward()
        same_gradients(*first)
        same_gradients(*second)


@SCENARIOS.add
def models_may_take_turns(ranks: Ranks) -> None:
    first, second = ranks.pair(mlp), ranks.pair(lambda: mlp()[:3])
    for _ in range(2):
        compare_training(*first, lambda model, step: model(ranks.batch(step, 4, 6)).pow(2).mean(), steps=2)
        compare_training(*second, lambda model, step: model(ranks.batch(step, 4, 6)).sin().mean(), steps=2)


@SCENARIOS.add
def torchs_own_wrapper_gives_the_same_over_backend_shm(ranks: Ranks) -> None:
    import torch
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register

    register()
    shm = dist.new_group(backend="cpu:shm")
    assert dist.get_backend_config(shm) == "cpu:shm"
    for make in (mlp, lambda: mlp().append(torch.nn.BatchNorm1d(3))):
        models = []
        for group in (shm, None):
            torch.manual_seed(ranks.rank)
            models.append(torch.nn.parallel.DistributedDataParallel(make(), process_group=group))
        compare_training(*models, lambda model, step: (model(ranks.batch(step, 8, 6)) * (step + 1)).sin().mean())


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_every_rank(failures: list[dict[str, str]], name: str) -> None:
    report = [f"rank {rank}: {own[name]}" for rank, own in enumerate(failures) if name in own]
    assert not report, "\n".join(report)
