"""What counts as sharded, in one process; several are in tests/distributed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate_cpp.parallel.sharded_models import is_sharded
from accelerate_cpp.parallel.wrappers import without_wrapper


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    # Not Gloo's: torch keeps groups of DTensors for good, and one with threads never ends in workers forked later.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def by(kind: str) -> torch.nn.Module:
    model, mesh = torch.nn.Linear(2, 2), init_device_mesh("cpu", (1,))
    if kind == "fully_shard":
        return fully_shard(model, mesh=mesh)
    if kind == "wrapper":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return distribute_module(model, mesh) if kind == "tensors" else model


@pytest.mark.parametrize("kind", ["fully_shard", "wrapper", "tensors"])
def test_a_model_is_sharded_as_a_whole_or_in_a_part(kind: str) -> None:
    assert is_sharded(by(kind))
    assert is_sharded(torch.nn.Sequential(torch.nn.ReLU(), by(kind)))


def test_other_models_are_whole() -> None:
    assert not is_sharded(by("none"))


def test_the_wrapper_of_version_1_is_one() -> None:
    model = by("wrapper")
    assert without_wrapper(model) is model.module
