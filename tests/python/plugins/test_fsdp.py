"""The plugin for FSDP."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import accelerate
import accelerate.utils.dataclasses as original
import pytest
import torch
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin, get_module_class_from_name
from accelerate_cpp.runtime import current
from accelerate_cpp.state import PartialState

Plugin = FullyShardedDataParallelPlugin
DTYPES = {"param_dtype": torch.float16, "reduce_dtype": torch.float32}
TRANSFORMER = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"sharding_strategy": "shard_grad_op"},
    {"sharding_strategy": "4"},
    {"sharding_strategy": "HYBRID_SHARD_ZERO2"},
    {"sharding_strategy": ShardingStrategy.NO_SHARD},
    {"sharding_strategy": "half"},
    {"sharding_strategy": "NO_SHARD", "reshard_after_forward": "FULL_SHARD"},
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"reshard_after_forward": "full_shard"},
    *(
        {"backward_prefetch": value}
        for value in ("backward_pre", "2", "NO_PREFETCH", "x", BackwardPrefetch.BACKWARD_PRE)
    ),
    *({"cpu_offload": value} for value in (True, False, "true", CPUOffload(True), CPUOffloadPolicy(), OffloadPolicy())),
    *({"state_dict_type": value} for value in ("full_state_dict", "LOCAL_STATE_DICT", "3", "x")),
    {"state_dict_type": StateDictType.SHARDED_STATE_DICT},
    {"state_dict_config": FullStateDictConfig(offload_to_cpu=False)},
    *({"auto_wrap_policy": value} for value in ("transformer_based_wrap", "SIZE_BASED_WRAP", "no_wrap", "x")),
    {"auto_wrap_policy": size_based_auto_wrap_policy},
    {**TRANSFORMER, "transformer_cls_names_to_wrap": "Linear,ReLU"},
    {**TRANSFORMER, "transformer_cls_names_to_wrap": ["Linear"]},
    {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5},
    {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "5"},
    *({"mixed_precision_policy": value} for value in ("fp16", "fp8", "fp32", "no", 7)),
    {"mixed_precision_policy": {**DTYPES, "buffer_dtype": torch.float16}},
    {"mixed_precision_policy": {**DTYPES, "output_dtype": torch.float16}},
    {"mixed_precision_policy": DTYPES},
    {"mixed_precision_policy": MixedPrecision(torch.bfloat16)},
    {"mixed_precision_policy": MixedPrecisionPolicy(torch.bfloat16)},
    {"ignored_modules": ".*norm"},
    {"limit_all_gathers": False},
    {"use_orig_params": True},
    {"sync_module_states": False},
    {"forward_prefetch": True},
    {"activation_checkpointing": True},
    {"activation_checkpointing_offload": True},
    {"activation_checkpointing": True, "activation_checkpointing_offload": True},
    {"cpu_ram_efficient_loading": False},
    {"param_init_fn": len},
]
VARIABLES: list[dict[str, str]] = [
    {"VERSION": "2"},
    {"VERSION": "two"},
    {"SHARDING_STRATEGY": "SHARD_GRAD_OP"},
    {"RESHARD_AFTER_FORWARD": "false"},
    {"RESHARD_AFTER_FORWARD": "NO_SHARD"},
    {"SHARDING_STRATEGY": "NO_SHARD", "RESHARD_AFTER_FORWARD": "true"},
    {"OFFLOAD_PARAMS": "true"},
    {"OFFLOAD_PARAMS": "x"},
    {"BACKWARD_PREFETCH": "BACKWARD_PRE", "FORWARD_PREFETCH": "true"},
    {"BACKWARD_PREFETCH": "NO_PREFETCH"},
    {"STATE_DICT_TYPE": "FULL_STATE_DICT"},
    {"STATE_DICT_TYPE": "LOCAL_STATE_DICT"},
    {"AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "TRANSFORMER_CLS_TO_WRAP": "Linear,ReLU"},
    {"AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "MIN_NUM_PARAMS": "7"},
    {"AUTO_WRAP_POLICY": "NO_WRAP", "MIN_NUM_PARAMS": "7", "TRANSFORMER_CLS_TO_WRAP": "Linear"},
    {"IGNORED_MODULES": ".*norm"},
    {"USE_ORIG_PARAMS": "true", "SYNC_MODULE_STATES": "false"},
    {"ACTIVATION_CHECKPOINTING": "true"},
    {"ACTIVATION_CHECKPOINTING_OFFLOAD": "true"},
    {"ACTIVATION_CHECKPOINTING": "true", "ACTIVATION_CHECKPOINTING_OFFLOAD": "true", "VERSION": "2"},
    {"CPU_RAM_EFFICIENT_LOADING": "false"},
    {"CPU_RAM_EFFICIENT_LOADING": "true", "VERSION": "2"},
]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)


class Model(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.Sequential(Block(), Block(), torch.nn.ReLU())


def without_ours(outcome: Any) -> Any:
    """What a plugin comes to, in the fields that the original has."""
    if isinstance(outcome, dict):
        return {name: value for name, value in outcome.items() if name not in ("weights_once_per_host", "zero_stage")}
    return outcome


def without_addresses(arguments: object) -> str:
    """A name for a test, which is the same in every process."""
    return re.sub(" at 0x[0-9a-f]+", "", str(arguments))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [None, 1, 2])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=without_addresses)
def test_arguments_come_to_what_they_come_to_in_the_original(
    arguments: dict[str, Any], version: int | None, comes_to: Callable[..., Any]
) -> None:
    own = without_ours(comes_to(Plugin, {"fsdp_version": version, **arguments}))
    theirs = comes_to(accelerate.FullyShardedDataParallelPlugin, {"fsdp_version": version, **arguments})
    if isinstance(own, dict) and "reshard_after_forward" in arguments and "sharding_strategy" not in arguments:
        theirs["sharding_strategy"] = own["sharding_strategy"]  # see the next test
    assert own == theirs


def test_the_newer_name_of_a_strategy_counts_too() -> None:
    plugin = Plugin(reshard_after_forward="no_shard")
    assert plugin.sharding_strategy is plugin.reshard_after_forward is ShardingStrategy.NO_SHARD


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_variables_come_to_what_they_come_to_in_the_original(
    variables: dict[str, str], comes_to: Callable[..., Any]
) -> None:
    environment = {f"FSDP_{name}": text for name, text in variables.items()}
    own = without_ours(comes_to(Plugin, {}, environment))
    assert own == comes_to(accelerate.FullyShardedDataParallelPlugin, {}, environment)


def test_the_fields_and_their_order_are_the_originals_and_ours_come_after() -> None:
    theirs = fields(accelerate.FullyShardedDataParallelPlugin)
    assert [(field.name, field.default) for field in fields(Plugin)] == [
        *((field.name, field.default) for field in theirs),
        ("weights_once_per_host", None),
        ("zero_stage", None),
    ]


@pytest.mark.parametrize(
    ("arguments", "stage"),
    [
        ({}, None),
        ({"fsdp_version": 2}, None),
        ({"fsdp_version": 2, "zero_stage": 3}, 3),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, 2),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, 2),
        ({"sharding_strategy": "FULL_SHARD"}, None),
    ],
    ids=str,
)
def test_the_stage_of_zero_is_that_of_the_field_or_of_a_strategy(arguments: dict[str, Any], stage: int | None) -> None:
    assert Plugin(**arguments).stage == stage


def test_the_stage_of_zero_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_ZERO_STAGE", "1")
    monkeypatch.setenv("FSDP_WEIGHTS_ONCE_PER_HOST", "true")
    plugin = Plugin(fsdp_version=2)
    assert (plugin.stage, plugin.weights_once_per_host) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fsdp_version": 3}, "fsdp_version=3; expected 1 or 2"),
        ({"sharding_strategy": "half"}, "sharding_strategy='half'; expected one of FULL_SHARD"),
        ({"reshard_after_forward": True}, "reshard_after_forward=True; in version 1 expected the name of a strategy"),
        (
            {"fsdp_version": 2, "sharding_strategy": "FULL_SHARD"},
            "belongs to version 1; in version 2 pass reshard_after_for",
        ),
        ({"fsdp_version": 2, "reshard_after_forward": 2}, "reshard_after_forward=2; expected true or false"),
        ({"fsdp_version": 2, "reshard_after_forward": "x"}, "reshard_after_forward='x'; expected true or false"),
        ({"fsdp_version": 2, "forward_prefetch": True}, "forward_prefetch=True belongs to version 1"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "version 2 has no LOCAL_STATE_DICT"),
        ({"auto_wrap_policy": "x"}, "auto_wrap_policy='x'; expected one of TRANSFORMER_BASED_WRAP"),
        ({"auto_wrap_policy": 0}, "auto_wrap_policy=0"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0.5}, "min_num_params=0.5; expected an integer"),
        ({"zero_stage": 4, "fsdp_version": 2}, "zero_stage=4; expected 1, 2 or 3"),
        ({"zero_stage": 1}, "zero_stage=1 needs fsdp_version=2"),
        (
            {"zero_stage": 1, "fsdp_version": 2, "mixed_precision_policy": "bf16"},
            "leave mixed_precision_policy out and pass mixed_precision to Accelerator",
        ),
        ({"weights_once_per_host": True}, "weights_once_per_host=True needs fsdp_version=2"),
        ({"activation_checkpointing_offload": True}, "needs activation_checkpointing=True and fsdp_version=2"),
    ],
    ids=str,
)
def test_a_refusal_says_what_is_expected(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Plugin(**arguments)


@pytest.mark.parametrize("option", [{"backward_prefetch": "BACKWARD_PRE"}, {"use_orig_params": True}])
def test_options_of_version_1_are_said_to_have_no_effect_in_2(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.warns(UserWarning, match=f"{name} has no effect in version 2"):
        plugin = Plugin(fsdp_version=2, **option)
    assert getattr(plugin, name) is None


def test_a_version_may_be_a_text() -> None:
    assert Plugin(fsdp_version="2").fsdp_version == 2  # type: ignore[arg-type]


def test_where_one_rank_reads_weights_the_others_get_memory_for_them(
    monkeypatch: pytest.MonkeyPatch, fresh_state: None
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")
    with pytest.warns(UserWarning, match="needs sync_module_states, which is switched on"):
        plugin = Plugin(cpu_ram_efficient_loading=True)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    assert plugin.sync_module_states
    assert plugin.param_init_fn is not None
    assert plugin.param_init_fn(torch.nn.Linear(2, 2, device="meta")).weight.device.type != "meta"
    PartialState(cpu=True)
    assert plugin.param_init_fn(torch.nn.Linear(2, 2, device="meta")).weight.device == PartialState().device
    monkeypatch.setattr(current, "session", replace(PartialState()._session, device=torch.device("meta")))
    assert plugin.param_init_fn(torch.nn.Linear(2, 2)).weight.device.type == "meta"


def test_a_function_that_makes_parameters_is_kept() -> None:
    def allocate(module: torch.nn.Module) -> None:
        pass

    assert Plugin(sync_module_states=True, param_init_fn=allocate).param_init_fn is allocate


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "call",
    [
        *({"mixed_precision": name} for name in ("fp16", "bf16", "fp8", "fp32", "no", torch.bfloat16, None)),
        {"mixed_precision": "bf16", "buffer_autocast": True},
        {"mixed_precision": "bf16", "override": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [None, "fp16"])
def test_the_precision_of_a_run_is_written_into_the_policy(
    version: int, call: dict[str, Any], before: str | None
) -> None:
    own, theirs = (
        kind(fsdp_version=version, mixed_precision_policy=before)
        for kind in (Plugin, accelerate.FullyShardedDataParallelPlugin)
    )
    try:
        theirs.set_mixed_precision(**call)
    except ValueError:
        with pytest.raises(InvalidArgument, match="expected one of fp8, fp16, bf16, fp32"):
            own.set_mixed_precision(**call)
    else:
        own.set_mixed_precision(**call)
    assert own.mixed_precision_policy == theirs.mixed_precision_policy


def test_a_changed_plugin_is_checked_again() -> None:
    plugin = Plugin(fsdp_version=2)
    plugin.cpu_offload = True
    plugin.set_cpu_offload()
    plugin.validate_cpu_offload()
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    plugin.cpu_offload = CPUOffload()
    with pytest.raises(InvalidArgument, match=r"cpu_offload=.*fsdp\.OffloadPolicy in version 2"):
        plugin.validate_cpu_offload()
    plugin.mixed_precision_policy = MixedPrecision()
    with pytest.raises(InvalidArgument, match=r"mixed_precision_policy=.*fsdp\.MixedPrecisionPolicy in version 2"):
        plugin.validate_mixed_precision_policy()


def test_the_options_of_checkpoints_follow_their_type_unless_they_are_the_users() -> None:
    plugin = Plugin()
    plugin.set_state_dict_type("sharded_state_dict")
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
    plugin.state_dict_type = "FULL_STATE_DICT"
    plugin.set_state_dict_type()
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    plugin.set_state_dict_type("LOCAL_STATE_DICT")
    assert plugin.state_dict_config is plugin.optim_state_dict_config is None
    own = Plugin(state_dict_config=FullStateDictConfig(offload_to_cpu=False))
    own.set_state_dict_type("FULL_STATE_DICT")
    assert own.state_dict_config == FullStateDictConfig(offload_to_cpu=False)


@pytest.mark.parametrize(
    "arguments",
    [
        TRANSFORMER,
        {**TRANSFORMER, "transformer_cls_names_to_wrap": "Linear, ReLU"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10},
        {"auto_wrap_policy": len},
        {},
    ],
    ids=str,
)
def test_the_policy_of_wrapping_is_made_for_a_model(arguments: dict[str, Any]) -> None:
    own = Plugin(**arguments)
    names = own.transformer_cls_names_to_wrap
    theirs = accelerate.FullyShardedDataParallelPlugin(**{**arguments, "transformer_cls_names_to_wrap": names})
    for plugin in (own, theirs):
        plugin.set_auto_wrap_policy(Model())
        plugin.set_auto_wrap_policy(Model())
    assert getattr(own.auto_wrap_policy, "keywords", own.auto_wrap_policy) == getattr(
        theirs.auto_wrap_policy, "keywords", theirs.auto_wrap_policy
    )
    assert own.transformer_cls_names_to_wrap == theirs.transformer_cls_names_to_wrap


def test_a_layer_that_a_model_lacks_is_refused() -> None:
    plugin = Plugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap="Zebra")
    with pytest.raises(InvalidArgument, match="has 'Zebra', but Model has no layer of that class"):
        plugin.set_auto_wrap_policy(Model())


@pytest.mark.parametrize("name", ["Block", "ReLU", "Model", "Zebra"])
def test_classes_are_found_by_name_as_in_the_original(name: str) -> None:
    model = Model()
    assert get_module_class_from_name(model, name) is original.get_module_class_from_name(model, name)
