"""Building modules on a chosen device: their tensors are moved there when they are registered."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from accelerate_cpp.config import env_table
from accelerate_cpp.placement.module_tensors import as_device, placed_parameter

__all__ = ["init_empty_weights", "init_on_device"]

_active = threading.local()


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Inside this block, this thread builds modules whose parameters have shapes but no values: they are on the meta
    device.

    Args:
        include_buffers: buffers too; ``None`` is what ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, by default no. Then
            every tensor that is made within it without a device is on the meta device.

    Example:
        >>> from torch import nn
        >>> from accelerate_cpp import init_empty_weights
        >>> with init_empty_weights():
        ...     model = nn.Linear(1000, 1000)
        >>> model.weight.device
        device(type='meta')
    """
    with init_on_device("meta", include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device | str | int, include_buffers: bool | None = None) -> Iterator[None]:
    """Inside this block, this thread builds modules whose parameters are on ``device``. The innermost such context
    decides.

    A parameter that several modules share stays shared.

    Args:
        include_buffers: buffers too; ``None`` is what ``ACCELERATE_INIT_INCLUDE_BUFFERS`` says, by default no. Then
            every tensor that is made within it without a device is on ``device``.

    Raises:
        InvalidArgument: the device is not present.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from accelerate_cpp import init_on_device
        >>> with init_on_device(torch.device("cpu")):
        ...     model = nn.Linear(2, 2)
        >>> model.weight.device
        device(type='cpu')
    """
    with_buffers = env_table.INIT_INCLUDE_BUFFERS.get() if include_buffers is None else include_buffers
    placing = _Placing(as_device(device))
    hook: Any = placing  # torch's types say that hooks return nothing
    handles = [register_module_parameter_registration_hook(hook)]
    if with_buffers:
        handles.append(register_module_buffer_registration_hook(hook))
    stack: list[_Placing] = _active.__dict__.setdefault("stack", [])
    stack.append(placing)
    try:
        with placing.device if with_buffers else nullcontext():
            yield
    finally:
        stack.remove(placing)
        for handle in handles:
            handle.remove()


class _Placing:
    """The hook that torch calls for each tensor that is registered, in any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._placed = WeakIdKeyDictionary()

    def __call__(self, _module: nn.Module, _name: str, tensor: Tensor) -> Tensor | None:
        stack = getattr(_active, "stack", None)
        if not stack or stack[-1] is not self or tensor is None or tensor.device == self.device:
            return None
        if tensor not in self._placed:
            self._placed[tensor] = self._moved(tensor)
        placed: Tensor = self._placed[tensor]
        return placed

    def _moved(self, tensor: Any) -> Tensor:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):  # of a lazy module; it has no shape yet
            kind: Any = type(tensor)
            empty: Tensor = kind(requires_grad=tensor.requires_grad, device=self.device, dtype=tensor.dtype)
            return empty
        moved: Tensor = tensor.detach().to(self.device)
        return placed_parameter(tensor, moved) if isinstance(tensor, nn.Parameter) else moved
