"""What torch's ``fully_shard`` keeps for each unit."""

from __future__ import annotations

from typing import Any

import torch

# Torch's modules for this take long to import.


def units_in(model: torch.nn.Module) -> list[Any]:
    """The modules in ``model``, itself included, that ``fully_shard`` has sharded, outer ones first."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def param_groups_of(unit: Any) -> list[Any]:
    """What ``fully_shard`` gathers together in ``unit``."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    state: Any = _get_module_fsdp_state(unit)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def weights_of(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """The two forms of each parameter in one object, and the mesh that shares it out, over all units of ``model``."""
    groups = [group for unit in units_in(model) for group in param_groups_of(unit)]
    return [(one, group.mesh_info) for group in groups for one in group.fsdp_params]
