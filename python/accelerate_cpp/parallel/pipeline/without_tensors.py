"""What a rank keeps of a whole model: all but the values of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.parallel.pipeline.blocks import shallow_copy

__all__ = ["can_be_saved", "without_tensors"]


def can_be_saved(model: nn.Module) -> bool:
    """Whether it has a configuration and writes its own files, as the models of Transformers do."""
    return hasattr(model, "config") and callable(getattr(model, "save_pretrained", None))


def without_tensors(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose parameters and buffers are on the meta device; what is one tensor is one again.

    Attributes of modules are the same objects, but for parameters, buffers and modules.
    """
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def empty(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            values = torch.empty_like(tensor.detach(), device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[id(tensor)] = nn.Parameter(values, tensor.requires_grad) if is_parameter else values
        return tensors[id(tensor)]

    def copied(module: nn.Module | None) -> Any:
        if module is None:
            return None
        if id(module) not in modules:
            modules[id(module)] = copy = shallow_copy(module)
            for own in (copy._parameters, copy._buffers):
                own.update({name: empty(tensor) for name, tensor in own.items()})
            copy._modules.update({name: copied(child) for name, child in module._modules.items()})
        return modules[id(module)]

    found: nn.Module = copied(model)
    return found
