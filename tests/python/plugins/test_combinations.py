from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.combinations import require_legal
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.plugins.parallelism_config import ParallelismConfig


@pytest.mark.parametrize(
    ("sizes", "processes", "shards"),
    [
        ({}, 4, False),
        ({"tp_size": 2}, 2, False),
        ({"cp_size": 2}, 2, False),
        ({"pp_size": 2}, 2, False),
        ({"dp_replicate_size": 2, "pp_size": 2, "tp_size": 2}, 8, False),
        ({"dp_shard_size": 2, "pp_size": 2}, 4, True),
        ({"dp_replicate_size": 2, "tp_size": 2}, 4, False),
        ({"dp_replicate_size": 2, "cp_size": 2}, 4, False),
        ({"dp_shard_size": 2, "tp_size": 2}, 4, True),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2, "tp_size": 2}, 16, True),
    ],
    ids=str,
)
def test_what_can_be_trained_is_accepted(sizes: dict[str, int], processes: int, shards: bool) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if shards else None
    require_legal(ParallelismConfig(**sizes), processes, plugin)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "plugin", "through_deepspeed", "message"),
    [
        ({"tp_size": 2}, None, False, "tp_size is 2, but there are 4 processes; expected 4"),
        ({"tp_size": 4}, {"zero_stage": 2}, False, "tp_size=4 with zero_stage=2 of the fsdp_plugin"),
        ({"pp_size": 4}, {"zero_stage": 2}, False, "pp_size=4 with zero_stage=2 of the fsdp_plugin"),
        ({"pp_size": 2, "cp_size": 2}, None, False, "pp_size=2 with cp_size=2; a pipeline cuts batches into"),
        ({"tp_size": 4}, {"weights_once_per_host": True}, False, "tp_size=4 with weights_once_per_host=True"),
        ({"dp_shard_size": 2, "tp_size": 2}, None, False, "dp_shard_size=2 shards parameters, which an fsdp_plugin"),
        ({"sp_size": 4}, None, False, "sp_size=4 splits sequences by the attention of DeepSpeed"),
        ({"tp_size": 4}, None, True, "tp_size=4 with DeepSpeed, which splits layers by tensor_parallel.autotp_size"),
        ({"sp_size": 3}, None, True, "sp_size is 3, but there are 4 processes"),
    ],
    ids=str,
)
def test_what_cannot_is_refused_with_its_reason(
    sizes: dict[str, Any], plugin: dict[str, Any] | None, through_deepspeed: bool, message: str
) -> None:
    sharding = None if plugin is None else FullyShardedDataParallelPlugin(fsdp_version=2, **plugin)
    with pytest.raises(InvalidArgument, match=message):
        require_legal(ParallelismConfig(**sizes), 4, sharding, through_deepspeed)
