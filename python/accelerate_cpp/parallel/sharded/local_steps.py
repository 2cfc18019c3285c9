"""Optimizer steps on plain tensors: what this process has of parameters in shards.

Each operation on a ``DTensor`` passes through Python, which takes longer than stepping a small parameter. Where an
optimizer treats every element for itself, the parts can be stepped without.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from accelerate_cpp.devices.shards import inner_tensor, is_sharded_tensor, wrapped_like

# Their states are numbers, or have an entry for each element of the parameter.
_ELEMENTWISE = {
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


@contextmanager
def stepping_on_local_parts(optimizer: torch.optim.Optimizer, num_own_hooks: int) -> Iterator[None]:
    """Inside this block, ``optimizer`` has the parts of this process as parameters, with their gradients and states.

    It stays as it is if elements may depend on each other, as in optimizers that take norms, or if the program has
    hooks around its steps, which look at parameters.

    Args:
        num_own_hooks: how many hooks around its steps are the strategy's own.
    """
    treats_elements_alone = type(optimizer) in _ELEMENTWISE and _num_hooks(optimizer) == num_own_hooks
    parts = _local_parts(optimizer) if treats_elements_alone else None
    if not parts:
        yield
        return
    state = optimizer.state
    parameters = [group["params"] for group in optimizer.param_groups]
    local_state: defaultdict[Any, Any] = defaultdict(dict, state)  # those that are not in shards share their entries
    for parameter, local in parts.items():
        if parameter in state:
            del local_state[parameter]
            local_state[local] = {name: inner_tensor(value) for name, value in state[parameter].items()}
        local.grad = None if parameter.grad is None else inner_tensor(parameter.grad)
    optimizer.state = local_state
    for group, whole in zip(optimizer.param_groups, parameters, strict=True):
        group["params"] = [parts.get(parameter, parameter) for parameter in whole]
    try:
        yield
    finally:
        optimizer.state = state
        for group, whole in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = whole
        for parameter, local in parts.items():
            local.grad = None
            if local in local_state:
                _take_over(state[parameter], local_state.pop(local), parameter)
        state.update(local_state)


def has_mixtures(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some group of ``optimizer`` has parameters in shards beside others."""
    return any(len({is_sharded_tensor(one) for one in group["params"]}) > 1 for group in optimizer.param_groups)


def _num_hooks(optimizer: Any) -> int:
    """Around steps, of this optimizer or of all."""
    return sum(
        len(hooks)
        for hooks in (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            torch_optimizer._global_optimizer_pre_hooks,
            torch_optimizer._global_optimizer_post_hooks,
        )
    )


def _local_parts(optimizer: torch.optim.Optimizer) -> dict[Any, torch.Tensor] | None:
    """By parameter in shards, its part; ``None`` if a gradient or a state is laid out otherwise than its parameter."""
    parts = {}
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return None
        for parameter in group["params"]:
            if not is_sharded_tensor(parameter):
                continue
            states = optimizer.state.get(parameter, {}).values()
            entries = [parameter.grad, *(one for one in states if isinstance(one, torch.Tensor) and one.ndim > 0)]
            if not all(one is None or _is_laid_out_like(one, parameter) for one in (parameter, *entries)):
                return None
            parts[parameter] = inner_tensor(parameter)
    return parts


def _is_laid_out_like(value: Any, parameter: Any) -> bool:
    """Whether equal elements are on equal processes, as plain tensors; sums that are still to be made are not."""
    return (
        is_sharded_tensor(value)
        and value._spec.placements == parameter._spec.placements
        and value._spec.mesh == parameter._spec.mesh
        and not any(placement.is_partial() for placement in value._spec.placements)
        and type(value._local_tensor) is torch.Tensor
    )


def _take_over(state: dict[str, Any], local_state: dict[str, Any], parameter: Any) -> None:
    """Brings ``state`` of ``parameter`` up to date with what a step has made of its part."""
    for name, value in local_state.items():
        if inner_tensor(state.get(name)) is not value:
            is_part = isinstance(value, torch.Tensor) and value.ndim > 0
            state[name] = wrapped_like(parameter, value) if is_part else value
