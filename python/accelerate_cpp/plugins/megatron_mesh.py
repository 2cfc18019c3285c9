"""What a plugin for Megatron-LM asks for, as the mesh, the shards and the pipeline of this package.

No library is needed: layers are split, models cut and states shared out by what a ``ParallelismConfig`` and a
``FullyShardedDataParallelPlugin`` of the same sizes do.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from accelerate_cpp.config import env_table
from accelerate_cpp.config.plugin_variables import Assumed
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.plugins.megatron import MegatronLMPlugin
from accelerate_cpp.plugins.parallelism import (
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelerate_cpp.plugins.parallelism_config import ParallelismConfig

__all__ = ["MeshOfMegatron", "chosen_megatron_plugin", "mesh_of_megatron"]

# What asks for another implementation of the same numbers, or of fewer bits, or for samples to be left out.
_WITHOUT_EFFECT = ("use_precision_aware_optimizer", "overlap_cpu_optimizer_d2h_h2d", "consumed_samples")


class MeshOfMegatron(NamedTuple):
    """How a run with a ``MegatronLMPlugin`` is parallel.

    Attributes:
        parallelism: the sizes of the mesh, with their options; ``None`` where all processes have a copy each.
        sharding: how optimizers, or all, are shared out; ``None`` where each copy has its own.
    """

    parallelism: ParallelismConfig | None
    sharding: FullyShardedDataParallelPlugin | None


def chosen_megatron_plugin(argument: Any, running: MegatronLMPlugin | None) -> MegatronLMPlugin | None:
    """The plugin of a run: the argument, else the running one, else with ``ACCELERATE_USE_MEGATRON_LM`` a new one.

    Raises:
        InvalidArgument: the argument is no plugin.
    """
    if argument is None:
        return MegatronLMPlugin() if running is None and env_table.USE_MEGATRON_LM.get() else running
    if argument == running:
        return running
    if not isinstance(argument, MegatronLMPlugin):
        raise InvalidArgument(f"megatron_lm_plugin={argument!r}: expected a MegatronLMPlugin")
    return argument


def mesh_of_megatron(plugin: MegatronLMPlugin, processes: int, on_cpu: bool) -> MeshOfMegatron:
    """The mesh of ``processes`` that ``plugin`` describes, innermost first: tensor, context, data, pipeline.

    Args:
        on_cpu: whether the processes compute on CPUs, where a distributed optimizer is stage 1 of ZeRO if models are
            neither split nor cut. Elsewhere, and with these, it is ``fully_shard`` that keeps gathered weights.

    Raises:
        InvalidArgument: the sizes do not divide ``processes``, or a field asks for what this package has not.
    """
    _require_supported(plugin)
    tensor, stages, sequences = int(plugin.tp_degree or 1), int(plugin.pp_degree or 1), _sequences(plugin)
    if min(tensor, stages, sequences) < 1 or processes % (tensor * stages * sequences):
        raise InvalidArgument(
            f"MegatronLMPlugin: tp_degree={tensor} × pp_degree={stages} × context_parallel_size={sequences} does not "
            f"divide the {processes} processes; choose degrees whose product does, the quotient is the number of copies"
        )
    copies = processes // (tensor * stages * sequences)
    shards = bool(plugin.use_distributed_optimizer or plugin.use_custom_fsdp)
    split = tensor * stages * sequences > 1
    sharding = _sharding(plugin, on_cpu and not split) if shards and (copies > 1 or sequences > 1) else None
    if plugin.optimizer_cpu_offload and sharding is None and not on_cpu:
        warnings.warn(
            "MegatronLMPlugin(optimizer_cpu_offload=True) has no effect: only states that are shared out are kept on "
            "the host; pass use_distributed_optimizer=True, too",
            stacklevel=2,
        )
    if not split:
        return MeshOfMegatron(None, sharding)
    sizes: dict[str, Any] = {"tp_size": tensor, "pp_size": stages, "cp_size": sequences}
    sizes["dp_replicate_size" if sharding is None else "dp_shard_size"] = copies
    if tensor > 1:
        sizes["tp_handler"] = TorchTensorParallelConfig(
            sequence_parallel=bool(plugin.sequence_parallelism), loss_parallel=True
        )
    if stages > 1:
        virtual = plugin.num_layers_per_virtual_pipeline_stage is not None
        sizes["pp_handler"] = PipelineParallelConfig(
            schedule="interleaved" if virtual else "1f1b" if (plugin.num_micro_batches or 1) >= stages else "gpipe",
            micro_batches=int(plugin.num_micro_batches or 1),
        )
    if sequences > 1:
        sizes["cp_handler"] = TorchContextParallelConfig(cp_comm_strategy="alltoall")
    return MeshOfMegatron(ParallelismConfig(**sizes), sharding)


def _sequences(plugin: MegatronLMPlugin) -> int:
    """The original's default, 2, is what nobody asked for, and would not fit an odd number of processes."""
    given = plugin.context_parallel_size
    return 1 if given is None or isinstance(given, Assumed) else int(given)


def _sharding(plugin: MegatronLMPlugin, by_zero: bool) -> FullyShardedDataParallelPlugin:
    options: dict[str, Any] = {"fsdp_version": 2, "cpu_offload": bool(plugin.optimizer_cpu_offload)}
    options |= {"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": False}
    if plugin.use_custom_fsdp:
        return FullyShardedDataParallelPlugin(
            reshard_after_forward=True, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **options
        )
    if by_zero:
        return FullyShardedDataParallelPlugin(zero_stage=1, **{**options, "cpu_offload": False})
    return FullyShardedDataParallelPlugin(reshard_after_forward=False, auto_wrap_policy="NO_WRAP", **options)


def _require_supported(plugin: MegatronLMPlugin) -> None:
    for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        size = getattr(plugin, name)
        if size not in (None, 1):
            raise InvalidArgument(
                f"MegatronLMPlugin: {name}={size}; experts are split by the plans that Transformers has for them: load "
                'the model with tp_plan="auto" and pass parallelism_config=ParallelismConfig(tp_size=...) instead of '
                "megatron_lm_plugin"
            )
    if plugin.pipeline_model_parallel_split_rank is not None:
        raise InvalidArgument(
            f"MegatronLMPlugin: pipeline_model_parallel_split_rank={plugin.pipeline_model_parallel_split_rank} cuts an "
            "encoder from a decoder, but models of both are not cut into stages here; use tp_degree for them"
        )
    if plugin.recompute_granularity not in (None, "full", "selective", "none"):
        raise InvalidArgument(
            f"MegatronLMPlugin: recompute_granularity={plugin.recompute_granularity!r}; expected 'full', 'selective', "
            "or 'none', which is not in the original"
        )
    if plugin.recompute_method not in (None, "uniform", "block"):
        raise InvalidArgument(
            f"MegatronLMPlugin: recompute_method={plugin.recompute_method!r}; expected 'uniform' or 'block'"
        )
    idle = [name for name in _WITHOUT_EFFECT if getattr(plugin, name)]
    if idle:
        warnings.warn(
            f"MegatronLMPlugin({', '.join(f'{name}={getattr(plugin, name)}' for name in idle)}) has no effect: "
            "optimizers step as torch's do, and loaders know where they are from checkpoints; leave it out",
            stacklevel=3,
        )
