"""The strategies by name, and the choice of one for a run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.strategy import Strategy


def _fully_sharded(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.sharded.fully_sharded import FullyShardedStrategy  # takes a while to import

    return FullyShardedStrategy(device, config.fsdp_plugin, mesh, config.mixed_precision not in (None, "no"))


def _zero(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.sharded.zero import ZeroStrategy

    return ZeroStrategy(device, config.fsdp_plugin, mesh, config.mixed_precision not in (None, "no"))


def _tensor_parallel(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.tensor.tensor_strategy import TensorParallelStrategy

    plugin = config.fsdp_plugin if config.shards else None
    options = config.parallelism and config.parallelism.tp_handler
    return TensorParallelStrategy(device, plugin, mesh, config.mixed_precision not in (None, "no"), options)


def _deepspeed(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    from accelerate_cpp.parallel.deepspeed.deepspeed_strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(device, config.deepspeed_plugins, mesh, config.sequences)


STRATEGIES: dict[str, Callable[[SessionConfig, torch.device, Mesh], Strategy]] = {
    "single": lambda config, device, mesh: SingleStrategy(),
    "data_parallel": lambda config, device, mesh: DataParallelStrategy(device, config.ddp_kwargs),
    "fully_sharded": _fully_sharded,
    "zero": _zero,
    "tensor_parallel": _tensor_parallel,
    "deepspeed": _deepspeed,
}


def strategy_for(config: SessionConfig, device: torch.device, mesh: Mesh) -> Strategy:
    """The strategy of a run: with more than one process, data parallelism, sharded or split if the user asks for it.

    Args:
        device: of this process.
        mesh: of all processes.
    """
    if config.uses_deepspeed:
        return STRATEGIES["deepspeed"](config, device, mesh)
    if mesh.size("tp") > 1:
        return STRATEGIES["tensor_parallel"](config, device, mesh)
    plugin = config.fsdp_plugin if config.shards else None
    stage = None if plugin is None else plugin.stage if device.type == "cpu" else plugin.zero_stage
    several = "zero" if stage else "fully_sharded" if config.shards else "data_parallel"
    return STRATEGIES["single" if mesh.world_size == 1 else several](config, device, mesh)
