"""Which parallelism a run may ask for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallelism_config import ParallelismConfig
from accelerate_cpp.plugins import data_parallelism
from accelerate_cpp.plugins.data_parallelism import (
    announce_sharding,
    chosen_fsdp_plugin,
    chosen_parallelism,
    rank_along,
    split_sequences,
    withdraw_sharding,
)
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.runtime import current
from accelerate_cpp.state import AcceleratorState, PartialState

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.fixture
def _third_of_four() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield
    dist.destroy_process_group()


def shards() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2)


def plain(config: Any) -> Any:
    return chosen_parallelism(config, None)


def test_nothing_and_one_copy_are_accepted() -> None:
    config = ParallelismConfig()
    assert plain(None) is None
    assert plain(config) is config


@pytest.mark.parametrize("copies", [1, 4])
@pytest.mark.usefixtures("_third_of_four")
def test_one_copy_per_process_is_accepted(copies: int) -> None:
    config = ParallelismConfig(dp_replicate_size=copies)
    assert plain(config) is config


def test_sequences_are_split_through_deepspeed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(sp_size=2)
    with pytest.raises(InvalidArgument, match=r"^parallelism_config: sp_size=2 .* pass deepspeed_plugin"):
        plain(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert chosen_parallelism(config, None, through_deepspeed=True) is config
    assert split_sequences(config) == (2, config.sp_handler)
    assert split_sequences(None) is split_sequences(ParallelismConfig()) is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidArgument, match="sp_size is 2, but there are 3 processes"):
        chosen_parallelism(config, None, through_deepspeed=True)


def test_another_number_of_copies_is_refused_before_processes_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="dp_replicate_size is 3, but there are 1 processes"):
        plain(ParallelismConfig(dp_replicate_size=3))
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert plain(ParallelismConfig(dp_replicate_size=3))


@pytest.mark.usefixtures("_third_of_four")
def test_shards_need_a_plugin_and_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    assert chosen_parallelism(config, shards()) is config
    assert config.axes() == {"dp_replicate": 2, "dp_shard": 2}
    with pytest.raises(
        InvalidArgument, match="dp_shard_size=2 shards parameters, which an fsdp_plugin has to describe"
    ):
        plain(config)
    with pytest.raises(InvalidArgument, match="dp_replicate_size × dp_shard_size is 6, but there are 4 processes"):
        chosen_parallelism(ParallelismConfig(dp_replicate_size=2, dp_shard_size=3), shards())
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "4")
    found = chosen_parallelism(None, shards())
    assert found is not None
    assert found.dp_shard_size == 4


def test_a_plugin_is_chosen_from_the_argument_the_run_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert chosen_fsdp_plugin(None, None) is None
    assert chosen_fsdp_plugin(plugin, None) is chosen_fsdp_plugin(None, plugin) is plugin
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found = chosen_fsdp_plugin(None, None)
    assert found is not None
    assert found.fsdp_version == 2


def test_sharding_is_announced_for_transformers_and_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    announce_sharding()
    assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    withdraw_sharding()
    assert "ACCELERATE_USE_FSDP" not in os.environ
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "1")
    announce_sharding()
    withdraw_sharding()
    assert os.environ["ACCELERATE_USE_FSDP"] == "1"


@pytest.mark.parametrize("found", [3, {"tp_size": 1}])
def test_what_is_no_configuration_is_refused(found: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^parallelism_config=.*: expected a ParallelismConfig$"):
        plain(found)


@pytest.mark.usefixtures("_third_of_four")
def test_the_place_of_a_process_is_0_where_there_is_one_process() -> None:
    config = ParallelismConfig(dp_replicate_size=4)
    mesh = config.get_device_mesh("cpu")
    assert [rank_along(config, mesh, name) for name in ("dp_replicate", "dp_shard", "tp")] == [2, 0, 0]
    assert rank_along(ParallelismConfig(), None, "dp_replicate") == 0
    with pytest.raises(InvalidArgument, match="no dimension tp, because it has no mesh; pass a ParallelismConfig"):
        rank_along(None, None, "tp")


def test_the_state_keeps_the_configuration_until_another_one_is_given() -> None:
    state, config, other = AcceleratorState(cpu=True), ParallelismConfig(), ParallelismConfig(dp_replicate_size=1)
    assert (state.parallelism_config, state.device_mesh) == (None, None)
    assert AcceleratorState(parallelism_config=config).parallelism_config is config
    assert AcceleratorState().parallelism_config is state.parallelism_config is config
    assert AcceleratorState(parallelism_config=other).parallelism_config is other
    AcceleratorState._reset_state()
    assert AcceleratorState().parallelism_config is None


@pytest.mark.usefixtures("_third_of_four")
def test_the_state_has_the_mesh_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    state = AcceleratorState(parallelism_config=ParallelismConfig(dp_replicate_size=4))
    assert state.device_mesh is not None
    assert (state.device_mesh.mesh_dim_names, state.device_mesh.get_local_rank()) == (("dp_replicate",), 2)
    session = replace(state._session, device=SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    monkeypatch.setattr(current, "session", session)
    with pytest.raises(InvalidArgument, match="there is already a mesh of cpu devices"):
        AcceleratorState()


def test_of_plugins_the_state_says_that_there_are_none() -> None:
    state = AcceleratorState(cpu=True)
    assert issubclass(AcceleratorState, data_parallelism.PluginViews)
    assert [state.deepspeed_plugins, state.deepspeed_plugin, state.torch_tp_plugin] == [None] * 3
    assert state.is_fsdp2 is False
    with pytest.raises(InvalidArgument, match=r"no plugin of DeepSpeed is called 'a'; the run has none"):
        state.get_deepspeed_plugin("a")
    with pytest.raises(InvalidArgument, match=r"no plugin of DeepSpeed is called 'None'"):
        state.select_deepspeed_plugin()
