"""Options of FSDP, as torch wants them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins import fsdp_options


@pytest.mark.parametrize("value", ["HYBRID_SHARD_ZERO2", "_hybrid_shard_zero2", "5", 5, ShardingStrategy(5)])
def test_a_member_is_found_by_its_name_its_number_and_itself(value: Any) -> None:
    assert fsdp_options.member_of(ShardingStrategy, value, "sharding_strategy") is ShardingStrategy(5)


@pytest.mark.parametrize("value", ["half", 6, True, object()])
def test_what_is_no_member_is_refused_with_all_of_them(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"what=.*; expected one of FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID"):
        fsdp_options.member_of(ShardingStrategy, value, "what")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("fp8", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp32", torch.float32),
        (torch.float64, torch.float64),
        (None, None),
    ],
)
def test_names_of_precisions_are_dtypes(value: Any, dtype: Any) -> None:
    assert fsdp_options.dtype_of(value) is dtype


@pytest.mark.parametrize("value", ["no", 16])
def test_another_precision_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected one of fp8, fp16, bf16, fp32, or a dtype"):
        fsdp_options.dtype_of(value)


def test_the_last_dtype_is_of_buffers_in_version_1_and_of_outputs_in_2() -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    assert fsdp_options.new_policy(1, *dtypes) == MixedPrecision(*dtypes)
    assert fsdp_options.new_policy(2, *dtypes) == MixedPrecisionPolicy(*dtypes)


def test_a_dict_is_a_policy_if_it_has_the_dtypes_of_its_version() -> None:
    dtypes = {"param_dtype": torch.float16, "reduce_dtype": torch.float32, "output_dtype": torch.float16}
    assert fsdp_options.policy_of_dict(2, dtypes) == MixedPrecisionPolicy(**dtypes)
    with pytest.raises(InvalidArgument, match="expected the keys param_dtype, reduce_dtype, buffer_dtype"):
        fsdp_options.policy_of_dict(1, dtypes)
    with pytest.raises(InvalidArgument, match=r"torch\.float16"):
        fsdp_options.policy_of_dict(2, {**dtypes, "param_dtype": "fp16"})


def test_an_object_of_another_class_is_refused() -> None:
    fsdp_options.require_instance(MixedPrecision(), MixedPrecision, "mixed_precision_policy", 1)
    with pytest.raises(InvalidArgument, match=r"policy=7; expected an instance of torch\.distributed\.fsdp\.MixedPrec"):
        fsdp_options.require_instance(7, MixedPrecision, "policy", 1)


def test_whole_state_dicts_are_gathered_on_the_host_of_rank_0() -> None:
    configs = fsdp_options.default_state_dict_configs()
    assert configs[StateDictType.FULL_STATE_DICT] == (
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
    )
    assert StateDictType.LOCAL_STATE_DICT not in configs
