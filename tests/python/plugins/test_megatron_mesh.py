"""The mesh that a plugin for Megatron-LM describes."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.megatron import MegatronLMPlugin
from accelerate_cpp.plugins.megatron_mesh import chosen_megatron_plugin, mesh_of_megatron


def sizes_of(processes: int, on_cpu: bool = True, **fields: Any) -> tuple[dict[str, int], Any]:
    parallelism, sharding = mesh_of_megatron(MegatronLMPlugin(**fields), processes, on_cpu)
    return {} if parallelism is None else parallelism.axes(), sharding


def test_degrees_are_axes_and_the_other_processes_copies() -> None:
    assert sizes_of(4) == ({}, None)
    assert sizes_of(8, tp_degree=2, pp_degree=2)[0] == {"dp_replicate": 2, "tp": 2, "pp": 2}
    assert sizes_of(4, context_parallel_size=2)[0] == {"dp_replicate": 2, "cp": 2}
    assert sizes_of(2, tp_degree=2)[0] == {"tp": 2}


def test_only_a_size_that_was_asked_for_splits_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = MegatronLMPlugin()
    assert plugin.context_parallel_size == 2  # the original's default
    assert mesh_of_megatron(plugin, 3, True) == (None, None)
    monkeypatch.setenv("MEGATRON_LM_CONTEXT_PARALLEL_SIZE", "2")
    assert sizes_of(2)[0] == {"cp": 2}


def test_a_distributed_optimizer_is_zero_on_cpus_and_shards_that_stay_gathered_elsewhere() -> None:
    axes, sharding = sizes_of(4, use_distributed_optimizer=True)
    assert (axes, sharding.zero_stage) == ({}, 1)
    axes, sharding = sizes_of(4, on_cpu=False, use_distributed_optimizer=True, optimizer_cpu_offload=True)
    assert (axes, sharding.zero_stage, sharding.reshard_after_forward) == ({}, None, False)
    assert sharding.cpu_offload
    axes, sharding = sizes_of(4, use_distributed_optimizer=True, tp_degree=2)
    assert (axes, sharding.reshard_after_forward) == ({"dp_shard": 2, "tp": 2}, False)
    assert sizes_of(2, use_distributed_optimizer=True, tp_degree=2) == ({"tp": 2}, None)
    axes, sharding = sizes_of(4, use_custom_fsdp=True, pp_degree=2)
    assert (axes, sharding.reshard_after_forward) == ({"dp_shard": 2, "pp": 2}, True)


def test_micro_batches_and_virtual_stages_choose_the_schedule() -> None:
    def stages(**fields: Any) -> Any:
        parallelism, _ = mesh_of_megatron(MegatronLMPlugin(pp_degree=4, **fields), 4, True)
        assert parallelism is not None
        return parallelism.pp_handler

    assert (stages(num_micro_batches=8).schedule, stages(num_micro_batches=8).micro_batches) == ("1f1b", 8)
    assert stages(num_micro_batches=2).schedule == "gpipe"  # 1F1B needs as many as there are stages
    assert stages(num_micro_batches=8, num_layers_per_virtual_pipeline_stage=1).schedule == "interleaved"


def test_sequences_between_split_layers_are_cut_if_asked_for() -> None:
    for cuts in (False, True):
        parallelism, _ = mesh_of_megatron(MegatronLMPlugin(tp_degree=2, sequence_parallelism=cuts), 2, True)
        assert parallelism is not None
        assert parallelism.tp_handler is not None
        assert parallelism.tp_handler.sequence_parallel is cuts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_degree": 3}, r"tp_degree=3 × pp_degree=1 × context_parallel_size=1 does not divide the 4 processes"),
        ({"tp_degree": 2, "pp_degree": 4}, "does not divide the 4 processes"),
        ({"tp_degree": -1}, "does not divide the 4 processes"),
        ({"expert_model_parallel_size": 2}, 'expert_model_parallel_size=2; experts .* tp_plan="auto"'),
        ({"pipeline_model_parallel_split_rank": 1}, "cuts an encoder from a decoder"),
        ({"recompute_granularity": "half"}, "recompute_granularity='half'; expected 'full', 'selective', or 'none'"),
        ({"recompute_method": "some"}, "recompute_method='some'; expected 'uniform' or 'block'"),
    ],
)
def test_what_there_is_not_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        sizes_of(4, **fields)


def test_fields_without_effect_are_told() -> None:
    with pytest.warns(UserWarning, match=r"use_precision_aware_optimizer=True\) has no effect"):
        sizes_of(2, use_precision_aware_optimizer=True)
    with pytest.warns(UserWarning, match="optimizer_cpu_offload=True.* has no effect.*use_distributed_optimizer"):
        sizes_of(2, on_cpu=False, optimizer_cpu_offload=True)


def test_the_plugin_of_a_run_is_the_argument_the_running_one_or_that_of_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plugin = MegatronLMPlugin()
    assert chosen_megatron_plugin(plugin, None) is chosen_megatron_plugin(None, plugin) is plugin
    assert chosen_megatron_plugin(None, None) is None
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")
    made = chosen_megatron_plugin(None, None)
    assert made is not None
    assert made.tp_degree == 2
    with pytest.raises(InvalidArgument, match="megatron_lm_plugin=3: expected a MegatronLMPlugin"):
        chosen_megatron_plugin(3, None)
