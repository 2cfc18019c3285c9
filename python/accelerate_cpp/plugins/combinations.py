"""Which kinds of parallelism can be combined, and why the others cannot."""

from __future__ import annotations

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.plugins.parallelism_config import ParallelismConfig

__all__ = ["require_legal"]


def require_legal(
    config: ParallelismConfig,
    processes: int,
    sharding: FullyShardedDataParallelPlugin | None = None,
    through_deepspeed: bool = False,
) -> None:
    """Refuses a mesh that cannot be trained on.

    Args:
        processes: of the run.
        sharding: how parameters are sharded; ``None`` where they are not.
        through_deepspeed: whether DeepSpeed trains.

    Raises:
        InvalidArgument: says which sizes contradict each other, why, and what to choose.
    """
    sizes = {name: int(getattr(config, f"{name}_size")) for name in config.active_mesh_dims}
    if through_deepspeed:
        _require_deepspeed(sizes, processes)
        return
    if "sp" in sizes:
        raise InvalidArgument(
            f"parallelism_config: sp_size={sizes['sp']} splits sequences by the attention of DeepSpeed, which a "
            "deepspeed_plugin has to ask for; pass deepspeed_plugin=DeepSpeedPlugin(...), too"
        )
    if "pp" in sizes and "cp" in sizes:
        raise InvalidArgument(
            f"parallelism_config: pp_size={sizes['pp']} with cp_size={sizes['cp']}; a pipeline cuts batches into "
            "micro-batches by itself, so that no block of the program could split their sequences. Split layers with "
            "tp_size and TorchTensorParallelConfig(sequence_parallel=True)"
        )
    if "dp_shard" in sizes and sharding is None:
        raise InvalidArgument(
            f"parallelism_config: dp_shard_size={sizes['dp_shard']} shards parameters, which an fsdp_plugin has to "
            "describe; pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), too"
        )
    for name in ("tp", "pp"):
        if name in sizes and sharding is not None:
            _require_plain_shards(name, sizes[name], sharding)
    if config.total_size not in (1, processes):
        named = " × ".join(f"{name}_size" for name in sizes)
        raise InvalidArgument(
            f"parallelism_config: {named} is {config.total_size}, but there are {processes} processes; expected "
            f"{processes}, or leave it out"
        )


def _require_deepspeed(sizes: dict[str, int], processes: int) -> None:
    others = sizes.keys() - {"dp_replicate", "dp_shard", "sp"}
    if others:
        found = ", ".join(f"{name}_size={sizes[name]}" for name in sorted(others))
        raise InvalidArgument(
            f"parallelism_config: {found} with DeepSpeed, which splits layers by tensor_parallel.autotp_size of its "
            "own configuration; set that, or leave DeepSpeed out"
        )
    copies, sequences = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1), sizes.get("sp", 1)
    if copies * sequences != processes and (copies != 1 or processes % sequences):
        raise InvalidArgument(
            f"parallelism_config: dp_replicate_size × dp_shard_size × sp_size is {copies * sequences}, but there are "
            f"{processes} processes; make the product their number"
        )


def _require_plain_shards(name: str, size: int, sharding: FullyShardedDataParallelPlugin) -> None:
    if sharding.stage:
        asked, instead = f"zero_stage={sharding.stage}", "FULL_SHARD, or reshard_after_forward without zero_stage"
    elif sharding.weights_once_per_host:
        asked, instead = "weights_once_per_host=True", "leave it out"
    else:
        return
    raise InvalidArgument(
        f"parallelism_config: {name}_size={size} with {asked} of the fsdp_plugin, which keeps the whole model in "
        f"memory that the processes of a host share, while each has its part of it here; choose {instead}"
    )
