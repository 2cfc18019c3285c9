"""What the façade says about kinds of parallelism in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from accelerate_cpp.accelerator import Accelerator
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallelism_config import ParallelismConfig
from accelerate_cpp.runtime import current
from accelerate_cpp.utils import (
    FullyShardedDataParallelPlugin,
    MegatronLMPlugin,
    TorchTensorParallelPlugin,
)

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.mark.parametrize(
    "other",
    [
        {"fsdp_plugin": FullyShardedDataParallelPlugin()},
        {"parallelism_config": ParallelismConfig(tp_size=2)},
        {"torch_tp_plugin": TorchTensorParallelPlugin(tp_size=2)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_only_one_plugin_says_how_models_are_split(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"megatron_lm_plugin .* each say how models are split"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(), **other)
    assert current.session is None


def test_degrees_have_to_fit_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidArgument, match=r"tp_degree=2 .* does not divide the 3 processes"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2))
    assert current.session is None


def test_one_process_trains_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == "NO"
    assert not hasattr(accelerator.state, "megatron_lm_plugin")
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    assert type(model) is torch.nn.Linear
    with pytest.raises(InvalidArgument, match="this process already has a state without this plugin"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=7))


def test_the_plugin_for_tensor_parallelism_asks_for_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin())
    assert accelerator.parallelism_config == ParallelismConfig()
    assert accelerator.state.torch_tp_plugin is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidArgument, match="tp_size is 2, but there are 3 processes"):
        Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))


def test_plugins_that_cannot_be_followed_are_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD_ZERO2")
    with pytest.raises(
        InvalidArgument, match=r"HYBRID_SHARD_ZERO2.*3 processes are not divisible by the 2 of this host"
    ):
        Accelerator(cpu=True, fsdp_plugin=plugin)
    with pytest.raises(InvalidArgument, match="choose SHARDED_STATE_DICT or FULL_STATE_DICT"):
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT"))
    with pytest.raises(InvalidArgument, match="fsdp_plugin=7: expected a FullyShardedDataParallelPlugin"):
        Accelerator(cpu=True, fsdp_plugin=7)
    assert current.session is None


@pytest.mark.parametrize("version", [1, 2])
def test_with_one_process_nothing_is_sharded(version: int) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))
    model = torch.nn.Linear(1, 1)
    assert accelerator.prepare(model) is model
    assert accelerator.distributed_type == "NO"
    assert not accelerator.is_fsdp2
    assert not env_table.USE_FSDP.get()


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_shard_size": 2}, {"dp_replicate_size": 2}], ids=str)
def test_another_parallelism_is_refused_before_anything_starts(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="parallelism_config"):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    assert current.session is None


def test_a_configuration_of_one_process_changes_nothing() -> None:
    config = ParallelismConfig()
    accelerator = Accelerator(cpu=True, parallelism_config=config)
    model = torch.nn.Linear(1, 1)
    assert accelerator.prepare(model) is model
    assert accelerator.parallelism_config is accelerator.state.parallelism_config is config
    assert accelerator.torch_device_mesh is None
    assert (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank) == (0, 0)
    assert accelerator.tensor_parallel_rank == 0
    assert Accelerator().parallelism_config is config


def test_without_a_configuration_there_are_no_places_in_a_mesh() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.parallelism_config is None
    for name in ("data_parallel_rank", "data_parallel_shard_rank", "tensor_parallel_rank"):
        with pytest.raises(InvalidArgument, match="because it has no mesh"):
            getattr(accelerator, name)


def test_places_come_from_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mesh:
        def get_local_rank(self, dimension: str) -> int:
            return {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 3}[dimension]

    accelerator = Accelerator(cpu=True)
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=2, tp_size=4)
    monkeypatch.setattr(accelerator.state, "parallelism_config", config)
    monkeypatch.setattr(accelerator.state, "device_mesh", Mesh())
    assert isinstance(accelerator.torch_device_mesh, Mesh)
    assert (accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank) == (1, 2)
    assert (accelerator.tensor_parallel_rank, accelerator.context_parallel_rank) == (3, 1)
    assert accelerator.pipeline_parallel_rank == 0


def test_a_run_is_neither_sharded_nor_deepspeeds() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.is_fsdp2 is accelerator.is_composable_parallelism_enabled is False
    assert accelerator.deepspeed_plugin is accelerator.deepspeed_engine_wrapped is None
    assert not hasattr(accelerator.state, "fsdp_plugin")


def test_without_several_processes_sequences_stay_whole() -> None:
    accelerator, batch, loader = Accelerator(cpu=True), torch.arange(4), [1, 2]
    with accelerator.maybe_context_parallel(buffers=[batch], buffer_seq_dims=[0], no_restore_buffers={batch}):
        assert batch.tolist() == [0, 1, 2, 3]
    with accelerator.maybe_context_parallel() as nothing:  # type: ignore[func-returns-value]
        assert nothing is None
    assert accelerator.deepspeed_ulysses_dl_adapter(loader, model=None) is loader


def test_lomos_backward_pass_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^Accelerator\.lomo_backward: .* use an optimizer of torch\.optim$"):
        Accelerator(cpu=True).lomo_backward(torch.ones(()), learning_rate=0.1)


@pytest.mark.parametrize(
    ("device_map", "spread"),
    [(None, False), ({"": 0}, False), ({"a": 0, "b": 1}, True), ({"a": "cuda:0", "b": "disk"}, True)],
    ids=str,
)
def test_a_model_that_was_spread_over_devices_is_noticed(device_map: Any, spread: bool) -> None:
    accelerator, inner = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    if device_map is not None:
        inner.hf_device_map = device_map
    assert accelerator.verify_device_map(inner) is spread
    assert accelerator.verify_device_map(torch.nn.Sequential(torch.nn.ReLU(), inner)) is spread
    assert accelerator.prepare(inner) is inner


def test_a_model_that_was_spread_over_devices_is_not_copied_to_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(1, 1)
    model.hf_device_map = {"a": 0, "b": 1}
    alone, several = accelerator._session, replace(accelerator._session.topology, world_size=2)
    monkeypatch.setattr(current, "session", replace(alone, topology=several))
    with pytest.raises(InvalidArgument, match="Linear was spread over devices by a device_map, so the 2 processes"):
        accelerator.prepare(model)
    monkeypatch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "true")
    assert accelerator.prepare(model) is not None


@pytest.mark.parametrize(
    ("device_map", "computes_on_cpu", "refused"),
    [
        ({"": "cpu"}, False, True),
        ({"": "cpu"}, True, False),
        ({"a": 0, "b": "disk"}, True, True),
        ({"": 0}, False, False),
        (None, False, False),
    ],
)
def test_layers_of_few_bits_are_trained_where_they_are_in_memory(
    device_map: dict[str, Any] | None, computes_on_cpu: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "accelerate_cpp.accelerator.is_bitsandbytes_multi_backend_available"
    monkeypatch.setattr(module, lambda: computes_on_cpu)
    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(2, 2)
    model.is_loaded_in_8bit, model.hf_device_map = True, device_map
    if not refused:
        assert accelerator.prepare(model) is model
        return
    with pytest.raises(InvalidArgument, match="loaded in 8-bit or 4-bit precision with CPU or disk offload"):
        accelerator.prepare(model)
