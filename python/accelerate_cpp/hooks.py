"""The public hooks of modules, which move inputs and weights to devices for a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.devices.memory import clear_device_cache
from accelerate_cpp.devices.transfer import send_to_device
from accelerate_cpp.placement.align_devices import AlignDevicesHook, Device
from accelerate_cpp.placement.attach_hooks import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from accelerate_cpp.placement.module_hooks import (
    AnyModule,
    Arguments,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate_cpp.placement.module_tensors import as_device

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]

__getattr__ = lending("hooks")


class CpuOffload(ModelHook):
    """Keeps a module on the CPU until its first forward pass, which moves it to another device, where it stays.

    Args:
        execution_device: by default the accelerator of this process, if it has one.
        prev_module_hook: the hook of a module that is first moved back to the CPU.

    Raises:
        InvalidArgument: the device is not present.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        if execution_device is None:
            from accelerate_cpp.state import PartialState

            execution_device = PartialState().default_device
        as_device(execution_device)
        self.execution_device = execution_device
        self.prev_module_hook = prev_module_hook

    def init_hook(self, module: AnyModule) -> AnyModule:
        """Moves ``module`` to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Moves the other module to the CPU, and ``module`` and its inputs to the execution device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
            clear_device_cache()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """The handle that users get for a module with a :class:`CpuOffload`.

    Args:
        model: the module.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Moves the module back to the CPU until its next forward pass."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Removes the hook from the module, which stays on its device."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Keeps the weights of a module in a small dtype, and converts them to another one for each forward pass.

    For inference: gradients do not reach the stored weights.

    Args:
        storage_dtype: such as ``torch.float8_e4m3fn``.
        compute_dtype: such as ``torch.bfloat16``.
        non_blocking: do not wait for the conversion.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: AnyModule) -> AnyModule:
        """Converts the floating-point weights and buffers of ``module`` to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Converts them to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Converts them back to the storage dtype."""
        self.forward_failed(module)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Converts them back to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
