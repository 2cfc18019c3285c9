"""Modules whose weights are offloaded: looking at them, bringing them for a while, and the state dict of it all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.placement.align_devices import AlignDevicesHook
from accelerate_cpp.placement.module_hooks import SequentialHook
from accelerate_cpp.placement.module_tensors import is_meta, set_module_tensor_to_device, walk
from accelerate_cpp.placement.offload import Folder, load_offloaded_weight
from accelerate_cpp.placement.offloaded_tensors import slots_of

__all__ = [
    "align_module_device",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "load_offloaded_weights",
    "offload_hook",
]


_logger = logging.getLogger(__name__)


def offload_hook(module: nn.Module) -> AlignDevicesHook | None:
    """The hook of ``module`` that keeps its weights away, if there is one."""
    waiting = [module.__dict__.get("_hf_hook")]
    while waiting:
        hook = waiting.pop()
        if isinstance(hook, SequentialHook):
            waiting.extend(hook.hooks)
        elif isinstance(hook, AlignDevicesHook) and hook.offload:
            return hook
    return None


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a hook keeps the weights of ``module`` away between forward passes."""
    return offload_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: torch.device | str | int | None = None) -> Iterator[None]:
    """Inside this block, the tensors of ``module`` itself have values, on ``execution_device``.

    What is offloaded is brought, and what is changed of it is lost afterwards, unless it is kept on that very device.
    Parameters that are not offloaded are moved there and back, with what was changed.

    Args:
        execution_device: by default, that of the hook for what is offloaded, and where other tensors are.

    Raises:
        InvalidArgument: the device is not present, or a tensor has no values.
    """
    hook = offload_hook(module)
    if hook is None:
        with _moved(module, execution_device):
            yield
        return
    before = hook.execution_device
    hook.execution_device = before if execution_device is None else execution_device
    try:
        hook.pre_forward(module)
        try:
            yield
        finally:
            hook.forward_failed(module)
    finally:
        hook.execution_device = before


@contextmanager
def _moved(module: nn.Module, device: torch.device | str | int | None) -> Iterator[None]:
    before = {} if device is None else {name: old for name, old in module._parameters.items() if old is not None}
    places = {name: old.device for name, old in before.items()}
    try:
        for name in before:
            assert device is not None
            set_module_tensor_to_device(module, name, device)
        yield
    finally:
        for name, place in places.items():
            now = module._parameters[name]
            if now is None or is_meta(now):  # without values there is nothing to bring back
                module._parameters[name] = before[name]
            else:
                set_module_tensor_to_device(module, name, place)


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: torch.device | str | int = "cpu",
) -> dict[str, Any]:
    """Fills the entries of ``state_dict`` that belong to ``module``, and returns it.

    Args:
        module_name: the name of one of the module's tensors in ``state_dict``, which tells that of the module.
        state_dict: entries that are not there yet are not added.
        device_to_put_offload: where copies of offloaded weights are made.
    """
    root = module_name.rpartition(".")[0]
    device = device_to_put_offload if has_offloaded_params(module) else None
    with align_module_device(module, device):
        for name, value in module.state_dict().items():
            key = f"{root}.{name}"
            if key in state_dict:
                state_dict[key] = value
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """The state dict of ``model``, with values on the CPU for what is offloaded.

    Offloaded weights that are on the CPU or in files already are not copied. Tensors that have values nowhere are left
    out, with a warning.
    """
    state_dict: dict[str, Any] = dict(model.state_dict())
    for prefix, module in walk(model):
        hook = offload_hook(module)
        if hook is None or hook.weights_map is None:
            continue
        for slot in slots_of(module, True, hook.place_submodules):
            old = state_dict.get(prefix + slot.name)
            if isinstance(old, Tensor) and is_meta(old) and slot.name in hook.weights_map:
                state_dict[prefix + slot.name] = hook.weights_map[slot.name].detach().to("cpu", old.dtype)
    empty = [name for name, value in state_dict.items() if isinstance(value, Tensor) and is_meta(value)]
    if empty:
        _logger.warning("left out of the state dict, as they have no values: %s", ", ".join(empty))
    return {name: value for name, value in state_dict.items() if name not in empty}


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Mapping[str, Any]] | None, offload_folder: Folder
) -> None:
    """Puts weights of a folder into ``model``, on the CPU.

    Args:
        index: dtype and shape of those to load, by name; ``None`` and an empty one load nothing.

    Raises:
        CheckpointError: a file is missing or damaged.
        InvalidArgument: ``model`` has no such tensor, or one of another shape.
    """
    for name, entry in (index or {}).items():
        weight = load_offloaded_weight(Path(offload_folder) / f"{name}.dat", entry)
        set_module_tensor_to_device(model, name, "cpu", value=weight)
