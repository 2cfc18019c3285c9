"""Moving models to a device."""

from __future__ import annotations

import torch
from torch import nn


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """``model``, moved to ``device`` in place. Its parameters stay the same objects, so that optimizers have them.

    On some devices a tensor of the CPU cannot become one of the device: torch would put new parameters into the model,
    of which optimizers know nothing, and shared ones would fall apart.

    Raises:
        RuntimeError: on such a device, something else refers to a parameter in a way that keeps it from being moved.
    """
    first = next(model.parameters(), None)
    if first is None or torch._has_compatible_shallow_copy_type(first, torch.empty(0, device=device)):
        return model.to(device)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
