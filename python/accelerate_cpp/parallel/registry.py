"""The strategies by name, and the choice of one for a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.devices.xla import XlaDevice
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.strategy import Strategy
from accelerate_cpp.plugins.parallelism import PipelineParallelConfig


def _low_precision(config: SessionConfig) -> bool:
    """Whether forward passes compute in less than fp32."""
    return config.mixed_precision not in (None, "no")


def _sharding(config: SessionConfig) -> Any:
    """The plugin that says how parameters are sharded; ``None`` where they are not."""
    return config.fsdp_plugin if config.shards else None


def _fully_sharded(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.sharded.fully_sharded import FullyShardedStrategy  # takes a while to import

    return FullyShardedStrategy(device, config.fsdp_plugin, mesh, _low_precision(config))


def _zero(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.sharded.zero import ZeroStrategy

    return ZeroStrategy(device, config.fsdp_plugin, mesh, _low_precision(config))


def _tensor_parallel(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.tensor.tensor_strategy import TensorParallelStrategy

    plugin = _sharding(config)
    options = config.parallelism and config.parallelism.tp_handler
    return TensorParallelStrategy(device, plugin, mesh, _low_precision(config), options)


def _pipeline(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.pipeline.pipeline_strategy import PipelineStrategy

    plugin = _sharding(config)
    given = config.parallelism
    layers, stages = (None, None) if given is None else (given.tp_handler, given.pp_handler)
    return PipelineStrategy(device, plugin, mesh, _low_precision(config), layers, stages or PipelineParallelConfig())


def _deepspeed(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.deepspeed.deepspeed_strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(device, config.deepspeed_plugins, mesh, config.sequences)


def _xla(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.xla import spmd
    from accelerate_cpp.parallel.xla.xla_strategy import XlaStrategy

    kind, plugin = kind_of(device), _sharding(config)
    assert isinstance(kind, XlaDevice)
    split = [axis for axis in ("pp", "tp", "cp", "sp") if mesh.size(axis) > 1]
    if split or config.uses_deepspeed or config.uses_megatron:
        asked = ", ".join(f"{axis}_size" for axis in split) or ("DeepSpeed" if config.uses_deepspeed else "Megatron-LM")
        raise InvalidArgument(
            f"{asked} on {device}: models are not split over processes of torch_xla; use an fsdp_plugin with SPMD, or "
            "train on CPUs or GPUs"
        )
    if plugin is not None and not spmd.is_on():
        raise InvalidArgument(
            f"fsdp_plugin on {device}: torch_xla shares out models over devices in SPMD mode (FSDPv2), which is off; "
            "call torch_xla.runtime.use_spmd() at the start of the program, before anything is on a device, and start "
            "one process. Or leave the plugin out, and wrap the model in torch_xla's XlaFullyShardedDataParallel"
        )
    return XlaStrategy(kind, mesh.world_size, plugin)


STRATEGIES: dict[str, Callable[[SessionConfig, torch.device, Mesh], Strategy]] = {
    "single": lambda config, device, mesh: SingleStrategy(),
    "data_parallel": lambda config, device, mesh: DataParallelStrategy(device, config.ddp_kwargs),
    "fully_sharded": _fully_sharded,
    "zero": _zero,
    "tensor_parallel": _tensor_parallel,
    "pipeline": _pipeline,
    "deepspeed": _deepspeed,
    "xla": _xla,
}


def strategy_for(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    """The strategy of a run: with more than one process, data parallelism, sharded or split if the user asks for it.

    Args:
        device: of this process.
        mesh: of all processes.
    """
    name = _name_of_strategy(config, device, mesh)
    if config.ddp_kwargs and name not in ("single", "data_parallel"):
        warnings.warn(
            f"DistributedDataParallelKwargs({', '.join(config.ddp_kwargs)}) has no effect where models are split or "
            "sharded over processes, or trained by DeepSpeed or torch_xla: what averages their gradients does not take "
            "it; leave it out",
            stacklevel=2,
        )
    return STRATEGIES[name](config, device, mesh)


def _name_of_strategy(config: SessionConfig, device: torch.device, mesh: Mesh) -> str:
    if isinstance(kind_of(device), XlaDevice):
        return "xla"
    if config.uses_deepspeed:
        return "deepspeed"
    for axis, name in (("pp", "pipeline"), ("tp", "tensor_parallel")):
        if mesh.size(axis) > 1:
            return name
    if mesh.world_size == 1:
        return "single"
    plugin = _sharding(config)
    stage = None if plugin is None else plugin.stage if device.type == "cpu" else plugin.zero_stage
    return "zero" if stage else "fully_sharded" if config.shards else "data_parallel"
