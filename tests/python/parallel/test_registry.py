"""Which strategy a run uses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate_cpp.comm.mesh import mesh_of
from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy
from accelerate_cpp.parallel.registry import STRATEGIES, strategy_for
from accelerate_cpp.parallel.sharded.fully_sharded import FullyShardedStrategy
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.strategy import Strategy
from accelerate_cpp.utils.dataclasses import DeepSpeedPlugin, FullyShardedDataParallelPlugin

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


def config_of(shards: bool) -> SessionConfig:
    return SessionConfig(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) if shards else None)


@pytest.mark.parametrize(
    ("world_size", "shards", "kind"),
    [
        (1, False, SingleStrategy),
        (1, True, SingleStrategy),
        (2, False, DataParallelStrategy),
        (8, False, DataParallelStrategy),
        (8, True, FullyShardedStrategy),
    ],
)
def test_several_processes_mean_data_parallelism_in_shards_where_a_plugin_says_so(
    world_size: int, shards: bool, kind: type[Strategy]
) -> None:
    mesh = mesh_of({}, 0, world_size, shards)
    assert type(strategy_for(config_of(shards), CPU, mesh)) is kind


@pytest.mark.parametrize("shards", [False, True])
def test_options_of_torchs_wrapper_are_told_where_they_have_no_effect(shards: bool) -> None:
    config = replace(config_of(shards), ddp_kwargs={"bucket_cap_mb": 10})
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        strategy_for(config, CPU, mesh_of({}, 0, 8, shards))
    told = [str(one.message) for one in shown if "has no effect" in str(one.message)]
    assert [text.partition(" ")[0] for text in told] == ["DistributedDataParallelKwargs(bucket_cap_mb)"] * shards


def _set_what_deepspeed_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("LOCAL_RANK", "0"), ("DS_ACCELERATOR", "cpu"), ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")):
        monkeypatch.setenv(name, text)


def test_every_entry_makes_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_what_deepspeed_exports(monkeypatch)
    mesh = mesh_of({}, 0, 8, shards=True)
    made = {name: make(config_of(True), CPU, mesh) for name, make in STRATEGIES.items() if name != "xla"}  # of a CPU
    assert all(isinstance(strategy, Strategy) for strategy in made.values())
    assert STRATEGIES.keys() - made.keys() == {"xla"}  # tests/distributed/test_xla.py


def test_a_plugin_of_deepspeed_makes_engines_of_one_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_what_deepspeed_exports(monkeypatch)
    config = SessionConfig(deepspeed_plugins=DeepSpeedPlugin())
    assert type(strategy_for(config, CPU, mesh_of({}, 0, 1, shards=False))).__name__ == "DeepSpeedStrategy"
