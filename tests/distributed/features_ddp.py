"""Checks of DistributedDataParallel, of its hooks, and of the optimizers and averagers that go with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from features_common import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    STEPS,
    Network,
    Ranks,
    batch,
    check,
    check_weights,
    network,
    optimizer_for,
    refused,
    train,
)


def trains_like_one_process(ranks: Ranks, tolerance: float = 1e-5, **options: Any) -> None:
    module = train(DDP(network(), **options), part=ranks.rank, parts=ranks.size)
    check_weights(module, train(network()), tolerance)


def plain(ranks: Ranks) -> None:
    trains_like_one_process(ranks)


def static_graph(ranks: Ranks) -> None:
    trains_like_one_process(ranks, static_graph=True)


def bucket_views(ranks: Ranks) -> None:
    trains_like_one_process(ranks, gradient_as_bucket_view=True)


def many_buckets(ranks: Ranks) -> None:
    trains_like_one_process(ranks, bucket_cap_mb=1e-5)


def first_rank_weights(ranks: Ranks) -> None:
    torch.manual_seed(ranks.rank)
    own = nn.Sequential(nn.Linear(INPUTS, 2), nn.BatchNorm1d(2))
    own[1].running_mean.fill_(float(ranks.rank))
    module = DDP(own)
    torch.manual_seed(0)
    check_weights(module, nn.Sequential(nn.Linear(INPUTS, 2), nn.BatchNorm1d(2)), 0.0)
    module.eval()(torch.ones(1, INPUTS))
    own[1].running_mean.fill_(float(ranks.rank) + 5)
    module.train()(torch.ones(2, INPUTS))
    assert own[1].num_batches_tracked == 1
    before_this_batch = (own[1].running_mean - 0.1 * own[0](torch.ones(1, INPUTS))[0]) / 0.9
    check(before_this_batch.detach(), torch.full((2,), 5.0), 1e-4)


class TwoHeads(Network):
    """Which of two heads is used depends on the input, and so differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        head = self.second if inputs[0, 0] > 0 else self.other
        result: Tensor = head(torch.tanh(self.first(inputs)))
        return result


def two_heads() -> TwoHeads:
    torch.manual_seed(0)
    return TwoHeads()


def unused_parameters(ranks: Ranks) -> None:
    module, expected = DDP(two_heads(), find_unused_parameters=True), two_heads()
    optimizer, expected_optimizer = optimizer_for(module), optimizer_for(expected)
    for step in range(STEPS):
        for part in range(ranks.size):
            # In odd steps all ranks use one head, in even ones every other rank uses the other.
            inputs, targets = batch(step, part, ranks.size)
            inputs[0, 0] = 1.0 if step % 2 or part % 2 else -1.0
            (nn.functional.mse_loss(expected(inputs), targets) / ranks.size).backward()
            if part == ranks.rank:
                nn.functional.mse_loss(module(inputs), targets).backward()
        for own, other in zip(module.parameters(), expected.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None)
        for one in (optimizer, expected_optimizer):
            one.step()
            one.zero_grad()
    check_weights(module, expected)


def no_sync(ranks: Ranks) -> None:
    module, expected = DDP(network()), network()
    for step in range(3):
        inputs, targets = batch(step, ranks.rank, ranks.size)
        if step < 2:
            with module.no_sync():
                nn.functional.mse_loss(module(inputs), targets).backward()
        else:
            nn.functional.mse_loss(module(inputs), targets).backward()
        inputs, targets = batch(step)
        nn.functional.mse_loss(expected(inputs), targets).backward()
    for own, other in zip(module.parameters(), expected.parameters(), strict=True):
        check(own.grad, other.grad, 1e-5)


def sparse_gradients(ranks: Ranks) -> None:
    torch.manual_seed(0)
    module = DDP(nn.Embedding(20, 3, sparse=True))
    module(torch.tensor([ranks.rank, 5, 10 + ranks.rank])).sum().backward()
    gradient = module.module.weight.grad
    assert gradient.is_sparse
    expected = torch.zeros(20, 3)
    for rank in range(ranks.size):
        expected[[rank, 5, 10 + rank]] += 1 / ranks.size
    check(gradient.to_dense(), expected, 1e-6)


def uneven_inputs(ranks: Ranks) -> None:
    module, expected = DDP(network()), network()
    optimizer, expected_optimizer = optimizer_for(module), optimizer_for(expected)
    steps = [2 + rank for rank in range(ranks.size)]
    with Join([module]):
        for step in range(steps[ranks.rank]):
            inputs, targets = batch(step, ranks.rank, ranks.size)
            nn.functional.mse_loss(module(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(max(steps)):
        for part in (rank for rank in range(ranks.size) if step < steps[rank]):
            inputs, targets = batch(step, part, ranks.size)
            (nn.functional.mse_loss(expected(inputs), targets) / ranks.size).backward()
        expected_optimizer.step()
        expected_optimizer.zero_grad()
    check_weights(module, expected)


def early_termination(ranks: Ranks) -> None:
    module = DDP(network())
    with refused("exhausted", kind=RuntimeError), Join([module], throw_on_early_termination=True):
        for step in range(1 + ranks.rank):
            inputs, targets = batch(step, ranks.rank, ranks.size)
            nn.functional.mse_loss(module(inputs), targets).backward()


def trains_with_hook(ranks: Ranks, state: Any, hook: Callable[..., Any], tolerance: float) -> None:
    module = DDP(network())
    module.register_comm_hook(state, hook)
    check_weights(train(module, part=ranks.rank, parts=ranks.size), train(network()), tolerance)


def allreduce_hook(ranks: Ranks) -> None:
    trains_with_hook(ranks, None, default_hooks.allreduce_hook, 1e-5)


def fp16_hook(ranks: Ranks) -> None:
    trains_with_hook(ranks, None, default_hooks.fp16_compress_hook, 2e-3)


def noop_hook(ranks: Ranks) -> None:
    module = DDP(network())
    module.register_comm_hook(None, debugging_hooks.noop_hook)
    check_weights(train(module, part=ranks.rank, parts=ranks.size), train(network(), part=ranks.rank, parts=ranks.size))


def builtin_fp16_hook(ranks: Ranks) -> None:
    module = DDP(network())
    module._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    check_weights(train(module, part=ranks.rank, parts=ranks.size), train(network()), 2e-3)


def own_hook(ranks: Ranks) -> None:
    """A future that another thread continues, and that gives a tensor other than the bucket's."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / ranks.size)

    trains_with_hook(ranks, None, hook, 1e-5)


def powersgd(ranks: Ranks) -> None:
    """With a rank as large as the matrices nothing is lost, and the hook must give the plain average."""
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=HIDDEN, start_powerSGD_iter=2, min_compression_rate=0
    )
    trains_with_hook(ranks, state, powerSGD_hook.powerSGD_hook, 1e-4)


def post_local_sgd(ranks: Ranks) -> None:
    module = DDP(network())
    group, _ = dist.new_subgroups(1)
    state = post_localSGD_hook.PostLocalSGDState(None, group, start_localSGD_iter=2)
    module.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    )
    train(module, optimizer, part=ranks.rank, parts=ranks.size)
    check_weights(module, local_sgd(ranks, local_steps={2, 3}, averaged_after={2}))


def local_sgd(ranks: Ranks, local_steps: set[int], averaged_after: set[int]) -> nn.Module:
    """In one process, what a rank gets when gradients stay local in some steps and weights are averaged after some."""
    modules = [network() for _ in range(ranks.size)]
    for step in range(STEPS):
        for part, module in enumerate(modules):
            inputs, targets = batch(step, part, ranks.size)
            nn.functional.mse_loss(module(inputs), targets).backward()
        for parameters in zip(*(module.parameters() for module in modules), strict=True):
            with torch.no_grad():
                gradients = [parameter.grad for parameter in parameters]
                mean = torch.stack(gradients).mean(0)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= 0.1 * (gradient if step in local_steps else mean)
                    parameter.grad = None
                if step in averaged_after:
                    average = torch.stack(parameters).mean(0)
                    for parameter in parameters:
                        parameter.copy_(average)
    return modules[ranks.rank]


def hierarchical_averaging(ranks: Ranks) -> None:
    """Pairs of ranks are averaged in every step, all four in every second one."""
    averager = hierarchical_model_averager.HierarchicalModelAverager(
        period_group_size_dict={1: 2, 2: ranks.size}, warmup_steps=0
    )
    module = nn.Linear(1, 1)
    module(torch.ones(1)).backward()  # parameters without a gradient would be left out
    expected = [float(rank) for rank in range(ranks.size)]
    for group in (ranks.size, 2, ranks.size, 2):
        with torch.no_grad():
            module.weight.fill_(expected[ranks.rank])
        averager.average_parameters(list(module.parameters()))
        first = ranks.rank // group * group
        check(module.weight.item(), sum(expected[first : first + group]) / group, 1e-6)


def zero_optimizer(ranks: Ranks) -> None:
    for views in (False, True):
        module, expected = DDP(network()), network()
        options = {"lr": 0.1, "momentum": 0.9}
        optimizer = ZeroRedundancyOptimizer(
            module.parameters(), torch.optim.SGD, parameters_as_bucket_view=views, **options
        )
        train(module, optimizer, part=ranks.rank, parts=ranks.size)
        expected_optimizer = torch.optim.SGD(expected.parameters(), **options)
        train(expected, expected_optimizer)
        check_weights(module, expected)
        optimizer.consolidate_state_dict(to=1)
        if ranks.rank == 1:
            ours, theirs = optimizer.state_dict()["state"], expected_optimizer.state_dict()["state"]
            assert ours.keys() == theirs.keys()
            for key in theirs:
                check(ours[key]["momentum_buffer"], theirs[key]["momentum_buffer"], 1e-5)


def compiled(ranks: Ranks) -> None:
    torch._dynamo.reset()
    module = DDP(network())
    train(torch.compile(module, backend="aot_eager"), optimizer_for(module), part=ranks.rank, parts=ranks.size)
    check_weights(module, train(network()))


def compiled_with_inductor(ranks: Ranks) -> None:
    torch._dynamo.reset()
    module = DDP(network())
    train(torch.compile(module), optimizer_for(module), part=ranks.rank, parts=ranks.size)
    check_weights(module, train(network()))


def bf16_hook_refused(ranks: Ranks) -> None:
    with refused("BF16 all reduce communication hook required CUDA 11+", kind=TypeError):
        DDP(network()).register_comm_hook(None, default_hooks.bf16_compress_hook)


def mixed_precision_refused(ranks: Ranks) -> None:
    from torch.nn.parallel.distributed import _MixedPrecision

    with refused("cpu backend doesn't support events", kind=RuntimeError):
        train(DDP(network(), mixed_precision=_MixedPrecision(param_dtype=torch.float16)))


def sync_batch_norm_refused(ranks: Ranks) -> None:
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(INPUTS, 2), nn.BatchNorm1d(2)))
    with refused("SyncBatchNorm layers only work with GPU modules", kind=ValueError):
        DDP(module)


def quantization_hooks_refused(ranks: Ranks) -> None:
    module = DDP(network())
    module.register_comm_hook(None, quantization_hooks.quantization_pertensor_hook)
    with refused("invalid index of a 0-dim tensor"):
        train(module)


def batched_powersgd_refused(ranks: Ranks) -> None:
    module = DDP(network())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0)
    module.register_comm_hook(state, powerSGD_hook.batched_powerSGD_hook)
    with refused("", kind=AssertionError, by="_orthogonalize"):
        train(module)
