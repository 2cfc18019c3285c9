"""Optimizer steps on parameters in shards beside others, as torch takes them on accelerators: all at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.parallel.sharded.fully_sharded import FullyShardedStrategy
from accelerate_cpp.parallel.sharded.local_steps import has_mixtures
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(split: bool) -> list[nn.Parameter]:
    """One in shards, if they are asked for, and a plain one, with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    first: torch.Tensor = torch.arange(6.0)
    if split:
        first = distribute_tensor(first, init_device_mesh("cpu", (1,)), [Shard(0)])
    found = [nn.Parameter(first), nn.Parameter(torch.ones(3))]
    for parameter in found:
        (parameter * parameter).sum().backward()
    return found


def strategy(device: str) -> FullyShardedStrategy:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    return FullyShardedStrategy(torch.device(device), plugin, Mesh(0, {"dp_shard": 1}), False)


def test_torch_does_not_step_on_a_mixture_at_once() -> None:
    optimizer = torch.optim.SGD(parameters(split=True), lr=0.1, momentum=0.9, foreach=True)
    assert has_mixtures(optimizer)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        optimizer.step()


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_mixture_is_stepped_on_as_plain_parameters_are(kind: type, device: str) -> None:
    own, expected = parameters(split=True), parameters(split=False)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer, plain = (kind(given, lr=0.1, foreach=True, **options) for given in (own, expected))
    assert not has_mixtures(plain)
    for _ in range(2):
        with strategy(device).stepping(optimizer):
            optimizer.step()
        plain.step()
    assert torch.equal(own[0].full_tensor(), expected[0])  # type: ignore[attr-defined]
    assert torch.equal(own[1], expected[1])
