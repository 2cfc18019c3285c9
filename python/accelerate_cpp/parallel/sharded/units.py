"""The modules of a model that are sharded and gathered one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.compilation import is_compiled_module
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin, class_to_wrap

Policy = Callable[[torch.nn.Module, int], bool]
"""Whether a module is a unit; it is asked with the number of its elements that no unit inside it has."""

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)  # have no forward pass before which they could be gathered
_CHECKPOINTED = "_checkpoint_wrapped_module"


def is_wrapper(module: torch.nn.Module) -> bool:
    """Whether ``module`` only compiles another, or computes its activations twice."""
    return is_compiled_module(module) or _CHECKPOINTED in module._modules


def inside_wrappers(module: torch.nn.Module) -> torch.nn.Module:
    """What is inside wrappers of the compiler and of activation checkpoints, in any order."""
    while is_wrapper(module):
        inner: Any = module._orig_mod if is_compiled_module(module) else module._modules[_CHECKPOINTED]
        module = inner
    return module


def policy_for(plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module) -> Policy | None:
    """The policy of ``plugin`` for ``model``; ``None`` if only the model as a whole is a unit.

    Raises:
        InvalidArgument: the model has no layer of a class that is to be a unit, or the policy is of an unknown kind.
    """
    from torch.distributed.fsdp.wrap import _Policy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policy: Any = plugin.auto_wrap_policy
    if policy is None:
        return None
    if policy is transformer_auto_wrap_policy:
        names = plugin.transformer_cls_names_to_wrap
        names = list(getattr(model, "_no_split_modules", None) or []) if names is None else names
        classes = tuple(class_to_wrap(model, name) for name in names)
        return lambda module, _: isinstance(module, classes)
    if policy is size_based_auto_wrap_policy:
        smallest = plugin.min_num_params or 0
        return (lambda _, elements: elements >= smallest) if smallest > 0 else None
    if isinstance(policy, _Policy):
        chosen = {id(module) for module in policy._run_policy(model, set(), {})}
        return lambda module, _: id(module) in chosen
    if isinstance(policy, partial) or callable(policy):
        return lambda module, elements: bool(policy(module=module, recurse=False, nonwrapped_numel=elements))
    raise InvalidArgument(
        f"FullyShardedDataParallelPlugin: auto_wrap_policy={policy!r}; expected a name or a function of torch's form, "
        "policy(module, recurse, nonwrapped_numel)"
    )


def from_below(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules inside ``model``, each once and after those inside it; without the model itself."""
    seen = {model}

    def visit(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                yield from visit(child)
                yield child

    return visit(model)


def units_of(model: torch.nn.Module, policy: Policy | None, ignored: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """The modules inside ``model`` that are sharded on their own, inner ones first.

    Args:
        ignored: parameters that are not sharded, and do not count.
    """
    if policy is None:
        return []
    users = _users(model)
    covered = set(map(id, ignored))
    inside = {id(inner) for module in from_below(model) if is_wrapper(module) for inner in module.children()}
    units = []
    for module in from_below(model):
        if id(module) in inside or isinstance(module, _CONTAINERS):
            continue  # of a wrapper, the outermost is the unit
        own = {id(weight): weight.numel() for weight in module.parameters()}
        parts = set(map(id, module.modules()))
        shared_with_outside = any(not users[key] <= parts for key in own)
        elements = sum(count for key, count in own.items() if key not in covered)
        if elements and not shared_with_outside and policy(inside_wrappers(module), elements):
            units.append(module)
            covered |= own.keys()
    return units


def _users(model: torch.nn.Module) -> dict[int, set[int]]:
    """By the ``id`` of each parameter, the ``id`` s of the modules that hold it."""
    users: dict[int, set[int]] = {}
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None:
                users.setdefault(id(weight), set()).add(id(module))
    return users


def ignored_parameters(
    plugin: FullyShardedDataParallelPlugin, model: torch.nn.Module, device: torch.device
) -> set[torch.nn.Parameter]:
    """The parameters of the modules that ``plugin`` leaves whole, after these are moved to ``device``."""
    asked = plugin.ignored_modules
    if asked is None:
        return set()
    if isinstance(asked, str):
        pattern = re.compile(asked)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    else:
        modules = list(asked)
    for module in modules:
        if not any(weight.is_meta for weight in module.parameters()):
            module.to(device)
    return {weight for module in modules for weight in module.parameters()}


def checkpoint_activations(
    model: torch.nn.Module, policy: Policy | None, ignored: Iterable[torch.Tensor], on_host: bool
) -> None:
    """Lets the units of ``model`` compute their activations again in the backward pass.

    Args:
        on_host: keep the inputs, from which they are computed, in the memory of the host.

    Raises:
        InvalidArgument: there are no units.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    units = set(units_of(model, policy, ignored))
    if not units:
        raise InvalidArgument(
            f"FullyShardedDataParallelPlugin: activation_checkpointing=True, but no module of {type(model).__name__} "
            "is a unit whose activations could be computed again; set auto_wrap_policy='transformer_based_wrap' and "
            "transformer_cls_names_to_wrap, or a policy by size"
        )
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in units and not is_wrapper(parent):
                wrapped = checkpoint_wrapper(child)  # with the random state of the first pass, as dropout needs
                parent._modules[name] = offload_wrapper(wrapped) if on_host else wrapped
