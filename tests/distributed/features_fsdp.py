"""Checks of fully sharded data parallelism: fully_shard, and the older FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_module
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from features_common import (
    Ranks,
    batch,
    check,
    check_weights,
    network,
    optimizer_for,
    refused,
    train,
    whole,
)


def sharded(mesh: DeviceMesh, hidden: int = 10, **options: Any) -> nn.Module:
    """The network, its first layer in a group of parameters of its own."""
    module = network(hidden=hidden)
    fully_shard(module.first, mesh=mesh, **options)
    return fully_shard(module, mesh=mesh, **options)


def trains_like_one_process(ranks: Ranks, mesh: DeviceMesh, tolerance: float = 1e-5, **options: Any) -> None:
    module = train(sharded(mesh, **options), part=ranks.rank, parts=ranks.size)
    check_weights(module, train(network(hidden=options.get("hidden", 10))), tolerance)


def plain(ranks: Ranks) -> None:
    trains_like_one_process(ranks, ranks.mesh())


def kept_gathered(ranks: Ranks) -> None:
    trains_like_one_process(ranks, ranks.mesh(), reshard_after_forward=False)


def uneven_shards(ranks: Ranks) -> None:
    """Seven rows over four ranks, and three: one rank has none."""
    trains_like_one_process(ranks, ranks.mesh(), hidden=7)


def hybrid(ranks: Ranks) -> None:
    trains_like_one_process(ranks, ranks.mesh(2, 2, names=("replicate", "shard")))


def replicated(ranks: Ranks) -> None:
    module = replicate_module(network(), mesh=ranks.mesh())
    check_weights(train(module, part=ranks.rank, parts=ranks.size), train(network()))


def bfloat16(ranks: Ranks) -> None:
    for reduce in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
        trains_like_one_process(ranks, ranks.mesh(), 1e-2, mp_policy=policy)


def float16(ranks: Ranks) -> None:
    """Gradients are reduced in float16, too, where torch divides before and after the sum."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    trains_like_one_process(ranks, ranks.mesh(), 2e-3, mp_policy=policy)


def clipping(ranks: Ranks) -> None:
    """The norm is that of the whole gradient."""
    module = train(sharded(ranks.mesh()), part=ranks.rank, parts=ranks.size, clip=0.05)
    check_weights(module, train(network(), clip=0.05))


def accumulation(ranks: Ranks) -> None:
    """Without synchronisation gradients stay whole and local; the last backward reduces their sum."""
    module, expected = sharded(ranks.mesh()), network()
    for step in range(3):
        module.set_requires_gradient_sync(step == 2)
        inputs, targets = batch(step, ranks.rank, ranks.size)
        nn.functional.mse_loss(module(inputs), targets).backward()
        inputs, targets = batch(step)
        nn.functional.mse_loss(expected(inputs), targets).backward()
    for own, other in zip(module.parameters(), expected.parameters(), strict=True):
        check(whole(own.grad), other.grad, 1e-5)


def early_unshard(ranks: Ranks) -> None:
    """A gather asked for before it is needed, and waited for later."""
    module = sharded(ranks.mesh())
    handle = module.unshard(async_op=True)
    module.first.unshard(async_op=True).wait()
    handle.wait()
    check([parameter.detach() for parameter in module.parameters()], [p.detach() for p in network().parameters()])
    module.reshard()
    module.first.reshard()
    check_weights(train(module, part=ranks.rank, parts=ranks.size), train(network()))


def compiled(ranks: Ranks) -> None:
    trains_compiled(ranks, "aot_eager")


def compiled_with_inductor(ranks: Ranks) -> None:
    trains_compiled(ranks, "inductor")


def trains_compiled(ranks: Ranks, compiler: str) -> None:
    torch._dynamo.reset()
    module = sharded(ranks.mesh())
    train(torch.compile(module, backend=compiler), optimizer_for(module), part=ranks.rank, parts=ranks.size)
    check_weights(module, train(network()))


def cpu_offload(ranks: Ranks) -> None:
    trains_like_one_process(ranks, ranks.mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))


CPU = torch.device("cpu")


def wrapped(**options: Any) -> FSDP:
    module = network()
    module.first = FSDP(module.first, device_id=CPU, **options)
    return FSDP(module, device_id=CPU, **options)


def check_wrapped(module: FSDP, expected: nn.Module, tolerance: float = 1e-5) -> None:
    with FSDP.summon_full_params(module):
        check_weights(module, expected, tolerance)


def older(ranks: Ranks) -> None:
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        for original in (False, True):
            module = wrapped(sharding_strategy=strategy, use_orig_params=original)
            train(module, part=ranks.rank, parts=ranks.size)
            check_wrapped(module, train(network()))


def older_hybrid(ranks: Ranks) -> None:
    module = network()
    mesh = ranks.mesh(2, 2, names=("replicate", "shard"))
    module = FSDP(module, device_id=CPU, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    check_wrapped(train(module, part=ranks.rank, parts=ranks.size), train(network()))


def older_mixed_precision(ranks: Ranks) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    module = train(wrapped(mixed_precision=precision), part=ranks.rank, parts=ranks.size)
    check_wrapped(module, train(network()), 1e-2)


def older_clipping(ranks: Ranks) -> None:
    module, expected = wrapped(), network()
    inputs, targets = batch(0, ranks.rank, ranks.size)
    nn.functional.mse_loss(module(inputs), targets).backward()
    inputs, targets = batch(0)
    nn.functional.mse_loss(expected(inputs), targets).backward()
    check(module.clip_grad_norm_(0.05), nn.utils.clip_grad_norm_(expected.parameters(), 0.05), 1e-5)
    for one in (module, expected):
        optimizer_for(one).step()
    check_wrapped(module, expected)


def older_state(ranks: Ranks) -> None:
    """The whole state of model and optimizer on rank 0, and back from there."""
    module = wrapped()
    optimizer = optimizer_for(module)
    train(module, optimizer, part=ranks.rank, parts=ranks.size)
    expected = train(network())
    with FSDP.state_dict_type(module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state = module.state_dict()
        momentum = FSDP.optim_state_dict(module, optimizer)["state"]
    if ranks.rank == 0:
        check(dict(state), dict(expected.state_dict()), 1e-5)
        assert momentum.keys() == state.keys()
    else:
        assert not state
    shared = [state, momentum]
    dist.broadcast_object_list(shared)
    other = wrapped()
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(shared[0])
    check_wrapped(other, expected)


def gradient_scaler(ranks: Ranks) -> None:
    """One rank's gradient overflows: all ranks skip the step."""
    module = wrapped()
    scaler, optimizer = ShardedGradScaler(device="cpu", init_scale=4.0), optimizer_for(module)
    for overflow in (True, False):
        inputs, targets = batch(0, ranks.rank, ranks.size)
        factor = torch.inf if overflow and ranks.rank == 1 else 1.0
        scaler.scale(nn.functional.mse_loss(module(inputs), targets) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if overflow:
            check_wrapped(module, network(), 0.0)
            assert scaler.get_scale() == 2.0
    expected = network()
    inputs, targets = batch(0)
    nn.functional.mse_loss(expected(inputs), targets).backward()
    optimizer_for(expected).step()
    check_wrapped(module, expected)


def without_device_refused(ranks: Ranks) -> None:
    with refused("FSDP needs a non-CPU accelerator device", kind=RuntimeError):
        train(FSDP(network()))
