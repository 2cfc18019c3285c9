"""The hook that brings inputs, and weights that are offloaded, to the device on which a module computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.devices.transfer import send_to_device
from accelerate_cpp.devices.tree import find_device
from accelerate_cpp.placement.module_hooks import AnyModule, Arguments, ModelHook
from accelerate_cpp.placement.module_tensors import (
    TiedTensors,
    as_device,
    is_meta,
    placed_parameter,
    set_module_tensor_to_device,
    walk,
)
from accelerate_cpp.placement.offloaded_tensors import Brought, Repeatable, bring, release, slots_of
from accelerate_cpp.placement.read_ahead import Unit, unit_of

__all__ = ["AlignDevicesHook", "Device", "SkipKeys"]

Device = int | str | torch.device
SkipKeys = str | list[str] | None


class AlignDevicesHook(ModelHook):
    """Brings the inputs of a module, and its weights if they are offloaded, to one device for each forward pass.

    Args:
        execution_device: where the forward pass runs; ``None`` leaves inputs where they are.
        offload: keep the weights on the meta device between forward passes.
        io_same_device: bring the output to the device of the first input.
        weights_map: the weights by name, if they are offloaded; by default they are copied to the CPU.
        offload_buffers: buffers too; else they stay on ``execution_device``.
        place_submodules: do all of this for the tensors of all modules in the module.
        skip_keys: entries of named arguments and outputs that stay where they are.
        tied_params_map: by address of a tensor that several modules share, the copies of it by device.

    Attributes:
        original_devices: where tensors were, by name, if they are offloaded.
        input_device: of the last first input, with ``io_same_device``.
        tied_params_names: the offloaded tensors that are shared.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: SkipKeys = None,
        tied_params_map: TiedTensors | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.input_device: torch.device | None = None
        self.param_original_devices: dict[str, torch.device] = {}
        self.buffer_original_devices: dict[str, torch.device] = {}
        self.original_devices: dict[str, torch.device] = {}
        self.tied_params_names: set[str] = set()
        self.tied_params_map = tied_params_map
        self._brought: list[Brought] = []
        self._last: Repeatable | None = None
        self._unit: Unit | None = None

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device!r}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )

    def init_hook(self, module: AnyModule) -> AnyModule:
        """Moves the tensors of ``module`` to the execution device, or takes their values away.

        Raises:
            InvalidArgument: the execution device is not present, or a tensor that should be there has no values.
        """
        device = None if self.execution_device is None else as_device(self.execution_device)
        if device is not None and device.type == "meta":
            self.tied_params_map = None
        if self.offload:
            self._take_away(module, device or torch.device("cpu"))
        if device is None:
            return module
        for prefix, owner in walk(module) if self.place_submodules else (("", module),):
            for label, tensor in [*owner._parameters.items(), *owner._buffers.items()]:
                if tensor is not None and not (self.offload and is_meta(tensor)):
                    set_module_tensor_to_device(
                        module, prefix + label, device, tied_params_map=self.tied_params_map, clear_cache=False
                    )
        return module

    def _take_away(self, module: nn.Module, device: torch.device) -> None:
        """Removes the values of offloaded tensors, except for those that the weights lack."""
        slots = list(slots_of(module, self.offload_buffers, self.place_submodules))
        if self.weights_map is None:
            self.weights_map = {slot.name: _on_cpu(slot.tensors[slot.label]) for slot in slots}
        dtypes: dict[str, torch.dtype] = {}
        for tensors, label, name in slots:
            tensor = tensors[label]
            if tensor is None or name not in self.weights_map:
                continue
            self.original_devices[name] = tensor.device
            if self.tied_params_map and not is_meta(tensor) and tensor.data_ptr() in self.tied_params_map:
                self.tied_params_names.add(name)
            away = tensor.detach().to("meta")
            tensors[label] = placed_parameter(tensor, away) if isinstance(tensor, nn.Parameter) else away
            dtypes[name] = tensor.dtype
        self._unit = unit_of(self.weights_map, dtypes, device)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Brings inputs and offloaded weights to the execution device.

        Raises:
            InvalidArgument: weights are missing, or have another shape than those of the module.
        """
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        device = self.execution_device
        brought = self._bring(module) if self.offload else None
        try:
            if device is not None:
                args = send_to_device(args, device)
                if kwargs:
                    kwargs = send_to_device(kwargs, device, skip_keys=self.skip_keys)
        except BaseException:
            if brought is not None:
                self.forward_failed(module)
            raise
        return args, kwargs

    def _bring(self, module: nn.Module) -> Brought:
        assert self.weights_map is not None
        copies = {} if self._unit is None else self._unit.arrive()
        brought = None if self._last is None else self._last.bring(module, self.weights_map, self.execution_device)
        if brought is None:
            slots = slots_of(module, self.offload_buffers, self.place_submodules)
            brought = bring(slots, self.weights_map, self.execution_device, self.tied_params_map, copies)
            self._last = Repeatable.of(module, brought, self.weights_map, self.execution_device)
        self._brought.append(brought)
        return brought

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Takes offloaded weights away again, and brings the output to the device of the input if asked to."""
        if self.offload and self._brought:
            release(self._brought.pop(), self.tied_params_map)
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def forward_failed(self, module: nn.Module) -> None:
        """Takes offloaded weights away again."""
        if self.offload and self._brought:
            release(self._brought.pop(), self.tied_params_map)

    def detach_hook(self, module: AnyModule) -> AnyModule:
        """Brings offloaded weights back to where they were, or to the CPU if they had no values then."""
        if self.offload:
            assert self.weights_map is not None
            for slot in list(slots_of(module, True, self.place_submodules)):
                device = self.original_devices.get(slot.name)
                if device is not None:
                    bring(iter([slot]), self.weights_map, "cpu" if device.type == "meta" else device)
            self.original_devices = {}
        return module


def _on_cpu(tensor: Tensor | None) -> Tensor:
    """``tensor``, or a copy of it on the CPU."""
    assert tensor is not None
    return tensor if tensor.device.type == "cpu" else tensor.detach().to("cpu")
