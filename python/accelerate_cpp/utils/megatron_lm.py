"""What programs import that train through Megatron-LM: its engine, stand-ins, wrappers and helper functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.prepare.megatron.datasets import MegatronLMDummyDataLoader
from accelerate_cpp.prepare.megatron.engine import MegatronEngine
from accelerate_cpp.prepare.megatron.groups import DataGroup
from accelerate_cpp.prepare.megatron.train_steps import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    T5TrainStep,
)
from accelerate_cpp.state import AcceleratorState
from accelerate_cpp.utils.operations import recursively_apply
from accelerate_cpp.utils.stepped_by_engines import OptimizerOfEngine, ScheduleOfEngine

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "GPTTrainStep",
    "MegatronEngine",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMOptimizerWrapper",
    "MegatronLMSchedulerWrapper",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
]

__getattr__ = lending("utils.megatron_lm")


class MegatronLMDummyScheduler:
    """A placeholder for the schedule of Megatron-LM.

    Args:
        optimizer: the optimizer.
        total_num_steps: the length of the schedule, in steps of all copies of the model together.
        warmup_num_steps: the length of its warm-up.
        kwargs: kept as they are.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer, self.total_num_steps, self.warmup_num_steps = optimizer, total_num_steps, warmup_num_steps
        self.kwargs = kwargs


class MegatronLMOptimizerWrapper(OptimizerOfEngine):
    """An optimizer that a ``MegatronEngine`` steps: ``step`` and ``zero_grad`` do nothing."""

    _skipped_attribute = "skipped_iter"


class MegatronLMSchedulerWrapper(ScheduleOfEngine):
    """A schedule that a ``MegatronEngine`` steps: ``step`` does nothing."""


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of each loss, without dimensions, over the processes with other batches or tokens; shape (losses,).

    Collective; no gradient flows through it.
    """
    return _data_group().averaged(torch.stack([loss.detach().reshape(()).clone() for loss in losses]))


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Concatenates the tensors of the processes with other batches along their first dimension, in containers as well.

    A tensor without dimensions gives one value per process. Collective.
    """
    data = _data_group()

    def gathered(own: torch.Tensor) -> torch.Tensor:
        rows = own.reshape(1) if own.ndim == 0 else own.contiguous()
        if data.alone or (data.group is not None and data.copies is None):
            return rows
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(data.copies))]
        dist.all_gather(parts, rows, group=data.copies)
        return torch.cat(parts)

    return recursively_apply(gathered, tensor, error_on_other_type=True)


def _data_group() -> DataGroup:
    state = AcceleratorState()
    return DataGroup(state.device_mesh, state.num_processes)
