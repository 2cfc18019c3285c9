"""Units of ``fully_shard`` whose weights are not gathered, because a host has them as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from accelerate_cpp.comm.host_group import HostGroup
from accelerate_cpp.parallel.sharded.fully_sharded_units import param_groups_of
from accelerate_cpp.parallel.sharded.host_weights import HostWeights


class GatherNothing(AllGather):
    """Takes the place of the all-gather of ``fully_shard``.

    Args:
        weights: what is there already; they live as long as a unit does.
    """

    def __init__(self, weights: HostWeights) -> None:
        self._weights = weights

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros([int(length) for length in size], dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        return None


def share_units(units: Sequence[Any], host: HostGroup, compute_dtype: torch.dtype | None) -> HostWeights:
    """Puts the weights of ``units`` once per host. A collective of the processes that share out the parameters.

    Args:
        units: modules after ``fully_shard``, on the CPU, whose parameters have values.
        compute_dtype: in which they compute, if that is not what is stepped on.
    """
    parameters = [one for unit in units for group in param_groups_of(unit) for one in group.fsdp_params]
    for one in parameters:
        one.reset_sharded_param()  # those of a model that was on the meta device have been replaced
    weights = HostWeights(host, [(one._orig_size, compute_dtype or one.sharded_param.dtype) for one in parameters])
    for index, one in enumerate(parameters):
        shard = weights.place(index, one.sharded_param._local_tensor)
        if shard is not one.sharded_param._local_tensor:
            one.sharded_param._local_tensor = shard
            one._sharded_param_data = shard.reshape(-1)
        _gather_one_number(shard, weights.wholes[index])
        one._init_extensions()
    weights.are_stepped_by(one.sharded_param for one in parameters)
    for unit in units:
        unit.set_custom_all_gather(GatherNothing(weights))
    weights.publish()
    return weights


def _gather_one_number(shard: Any, whole: torch.Tensor) -> None:
    """Makes ``shard`` a tensor that knows how it is gathered, as ``fully_shard`` has it; the result is ``whole``."""
    number = torch.zeros(1, dtype=whole.dtype)

    def fsdp_pre_all_gather(mesh: Any) -> Any:
        return (number,), None

    def fsdp_post_all_gather(
        outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        return None if out is not None else (whole, ())

    shard.fsdp_pre_all_gather = fsdp_pre_all_gather
    shard.fsdp_post_all_gather = fsdp_post_all_gather
