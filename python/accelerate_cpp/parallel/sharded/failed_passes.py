"""What ``fully_shard`` keeps of a backward pass that ended in an exception, and would add to the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

from accelerate_cpp.parallel.sharded.fully_sharded_units import param_groups_of, units_in


def forget_pass(model: torch.nn.Module) -> None:
    """Lets the next pass through ``model`` begin as if this one had never been; its gradients are lost."""
    for unit in units_in(model):
        _forget(unit)
        unit.reshard()


def _forget(unit: Any) -> None:
    state: Any = _get_module_fsdp_state(unit)
    state._training_state = TrainingState.IDLE
    context = state._state_ctx
    context.post_backward_final_callback_queued = False
    if hasattr(context, "iter_forward_root"):
        context.iter_forward_root = None
    for group in param_groups_of(unit):
        group._training_state = TrainingState.IDLE
        if hasattr(group.comm_ctx, "_last_post_reduce_events"):
            group.finalize_backward()
        group.comm_ctx.post_forward_order.clear()
        getattr(group.comm_ctx, "reduce_scatter_states", []).clear()
        for one in group.fsdp_params:
            one.sharded_param.grad = None
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
