"""Models inside the wrapper of FSDP's version 1 (``FullyShardedDataParallel``), whose parameters are flattened.

Torch's modules for it take long to import; unless the program has, no model is of that kind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.errors import InvalidArgument


def wrappers_in(model: torch.nn.Module) -> list[Any]:
    """All wrappers in ``model``, itself included, outer ones first."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = () if fsdp is None else fsdp.FullyShardedDataParallel
    return [module for module in model.modules() if isinstance(module, kind)]


def outermost_in(model: torch.nn.Module) -> list[Any]:
    """Those that are in no other."""
    found = wrappers_in(model)
    inside = {id(inner) for wrapper in found for inner in wrapper.modules() if inner is not wrapper}
    return [wrapper for wrapper in found if id(wrapper) not in inside]


def flat_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that autograd knows."""
    return [handle.flat_param for _, handle in _handles(model)]


def averaged_in(model: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """The ``id`` of each parameter that a wrapper averages, and over how many processes."""
    for wrapper, handle in _handles(model):
        copies = getattr(wrapper, "_inter_node_pg", None)
        processes = wrapper.process_group.size() * (1 if copies is None else copies.size())
        for parameter in _parameters_of(handle):
            yield id(parameter), processes


def groups_of(model: torch.nn.Module) -> dict[int, dist.ProcessGroup]:
    """By the ``id`` of the parameters of which each process has a part, the processes that have the parts."""
    return {
        id(parameter): wrapper.process_group
        for wrapper, handle in _handles(model)
        if handle.uses_sharded_strategy
        for parameter in _parameters_of(handle)
    }


def whole_states(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Inside this block, ``model.state_dict()`` gathers on all processes."""
    if not wrappers_in(model):
        return nullcontext()
    from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

    config = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    kind = StateDictType.FULL_STATE_DICT
    states: AbstractContextManager[Any] = FullyShardedDataParallel.state_dict_type(model, kind, config)
    return states


def refuse(model: torch.nn.Module, operation: str) -> None:
    """Raises ``InvalidArgument`` for what is not done with flattened parameters."""
    if wrappers_in(model):
        raise InvalidArgument(
            f"{operation}: a {type(model).__name__} has flattened parameters of FullyShardedDataParallel, of which the "
            "state of an optimizer cannot be told by names; save it by torch.distributed.checkpoint.state_dict "
            "(get_optimizer_state_dict), and the model by get_state_dict; or shard it by fully_shard"
        )


def _handles(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    return [(wrapper, wrapper._handle) for wrapper in wrappers_in(model) if wrapper._handle is not None]


def _parameters_of(handle: Any) -> list[torch.nn.Parameter]:
    return [handle.flat_param, *(handle.flat_param._params or ())]
