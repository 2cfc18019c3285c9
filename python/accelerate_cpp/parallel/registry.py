"""The strategies by name, and the choice of one for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from accelerate_cpp.parallel.data_parallel_strategy import DataParallelStrategy
from accelerate_cpp.parallel.single import SingleStrategy
from accelerate_cpp.parallel.strategy import Strategy

STRATEGIES: dict[str, Callable[[torch.device, Mapping[str, Any]], Strategy]] = {
    "single": lambda device, ddp_kwargs: SingleStrategy(),
    "data_parallel": DataParallelStrategy,
}


def strategy_for(*, world_size: int, device: torch.device, ddp_kwargs: Mapping[str, Any]) -> Strategy:
    """The strategy of a run: data parallelism as soon as there is more than one process.

    Args:
        world_size: number of processes.
        device: of this process.
        ddp_kwargs: the values of ``DistributedDataParallelKwargs`` that the user set.
    """
    return STRATEGIES["data_parallel" if world_size > 1 else "single"](device, ddp_kwargs)
