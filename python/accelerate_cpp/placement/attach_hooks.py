"""Attaching the hooks that move inputs and weights to the devices of a model's blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from accelerate_cpp.placement.align_devices import AlignDevicesHook, Device, SkipKeys
from accelerate_cpp.placement.first_fit import prefixes
from accelerate_cpp.placement.module_hooks import add_hook_to_module
from accelerate_cpp.placement.module_tensors import TiedTensors
from accelerate_cpp.placement.offload import PrefixedDataset
from accelerate_cpp.placement.offloaded_tensors import slots_of

# Modules whose forward reads weights of their submodules without calling them, so that their hooks run too late.
_READING_THEIR_PARTS = (nn.MultiheadAttention,)


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attaches a hook for inputs on ``execution_device`` to ``module`` and all its submodules with weights and without
    a hook.

    Args:
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: classes of modules whose submodules get no hook.
        tied_params_map: copies of shared tensors.
    """
    if "_hf_hook" not in module.__dict__ and next(iter(slots_of(module, True, recurse=True)), None) is not None:
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if type(module).__name__ not in (preload_module_classes or ()):
        for child in module.children():
            attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attaches an :class:`AlignDevicesHook` to ``module`` and all its submodules that have tensors of their own.

    Args:
        execution_device: the device of forward passes.
        offload: keep weights away between forward passes.
        weights_map: the weights by name.
        offload_buffers: buffers too.
        module_name: the prefix of its tensors' names in ``weights_map``.
        skip_keys: keyword arguments that are not moved.
        preload_module_classes: classes of modules that read weights of their submodules directly; the weights of such a
            module and its submodules are loaded and released together.
        tied_params_map: copies of shared tensors.
    """
    whole = type(module).__name__ in (preload_module_classes or ()) or isinstance(module, _READING_THEIR_PARTS)
    whole = whole and offload
    if whole or any(tensor is not None for tensor in [*module._parameters.values(), *module._buffers.values()]):
        hook = AlignDevicesHook(
            execution_device,
            offload,
            weights_map=_inside(weights_map, module_name),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    for name, child in () if whole else module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def _inside(weights: Mapping[str, Tensor] | None, module_name: str) -> Mapping[str, Tensor] | None:
    return weights if weights is None or not module_name else PrefixedDataset(weights, f"{module_name}.")


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    tied_params_map: TiedTensors | None = None,
) -> None:
    """Attaches to each block in ``module`` that a device map names the hooks that it needs to run on its device.

    Without mappings ``module`` is the one block. A tensor beside blocks may be named, too.

    Args:
        execution_device: where the forward pass of each block runs, by its name; ``""`` is ``module``.
        offload: whether its weights are away between forward passes, by its name.
        weights_map: the weights by name.
        offload_buffers: offload buffers, too.
        module_name: the name of ``module``.
        skip_keys: keyword arguments and entries of outputs that are not moved.
        preload_module_classes: classes of modules that read weights of their submodules directly; the weights of such a
            module and its submodules are loaded and released together.
        tied_params_map: copies of shared tensors.
    """
    common = (skip_keys, preload_module_classes, tied_params_map)
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(module, execution_device, True, weights_map, offload_buffers, module_name, *common)
        else:
            hook = AlignDevicesHook(
                execution_device,
                io_same_device=True,
                place_submodules=True,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(module, hook)
        return
    names = execution_device if isinstance(execution_device, Mapping) else offload
    assert isinstance(names, Mapping)
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(names, execution_device)
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(names, offload)
    blocks = _Blocks(devices, offloads, weights_map, offload_buffers, *common)
    blocks.attach(module, module_name)


class _Blocks:
    """The arguments of :func:`attach_align_device_hook_on_blocks`, for all blocks."""

    def __init__(
        self,
        devices: Mapping[str, Device | None],
        offloads: Mapping[str, bool],
        weights_map: Mapping[str, Tensor] | None,
        offload_buffers: bool,
        skip_keys: SkipKeys,
        preload_module_classes: Sequence[str] | None,
        tied_params_map: TiedTensors | None,
    ) -> None:
        self._devices = dict(devices)
        self._offloads = {name: offload for name, offload in offloads.items() if name in devices}
        self._weights, self._offload_buffers = weights_map, offload_buffers
        self._common = (skip_keys, preload_module_classes, tied_params_map)
        parents = {name.rpartition(".")[0] for name in self._offloads if name}
        self._around = {path for parent in parents for path in (*prefixes(parent), "")}

    def attach(self, module: nn.Module, name: str) -> None:
        """Attaches the hooks of ``module``, if it is a block or has tensors that are named, and of those in it.

        If a block contains other blocks, each of its modules that the map does not name becomes a block on the same
        device.
        """
        has_blocks = name in self._around
        if name in self._offloads and not has_blocks:
            self._attach_block(module, name)
            return
        self._attach_own_tensors(module, name)
        for label, child in module.named_children():
            path = f"{name}.{label}" if name else label
            if name in self._offloads and path not in self._offloads:
                self._devices[path], self._offloads[path] = self._devices[name], self._offloads[name]
            self.attach(child, path)

    def _attach_block(self, module: nn.Module, name: str) -> None:
        skip_keys, _, tied = self._common
        device, offload = self._devices[name], self._offloads[name]
        if offload:
            attach_align_device_hook(module, device, True, self._weights, self._offload_buffers, name, *self._common)
        if not offload or "_hf_hook" not in module.__dict__:
            hook = AlignDevicesHook(
                device,
                io_same_device=name == "",
                place_submodules=not offload,
                skip_keys=skip_keys,
                tied_params_map=tied,
            )
            add_hook_to_module(module, hook)
        if device is not None:
            attach_execution_device_hook(module, device, *self._common)

    def _attach_own_tensors(self, module: nn.Module, name: str) -> None:
        """For the whole model, and for modules in it whose parts are on different devices but that have own tensors.

        These are brought to the device of the module, else that of the first of them that is named, else that of the
        first block in the module.
        """
        prefix = f"{name}." if name else ""
        own = [prefix + label for label in [*module._parameters, *module._buffers]]
        named = [key for key in (name, *own) if key in self._offloads]
        blocks = (key for key in self._devices if key.startswith(prefix) and key)
        first = next(iter(named), None if not own else next(blocks, None))
        if name and first is None:
            return
        skip_keys, _, tied = self._common
        offload = any(self._offloads[key] for key in named) and bool(own)
        hook = AlignDevicesHook(
            self._devices.get("") if first is None else self._devices[first],
            offload=offload,
            io_same_device=not name,
            weights_map=_inside(self._weights, name) if offload else None,
            offload_buffers=self._offload_buffers,
            skip_keys=skip_keys,
            tied_params_map=tied,
        )
        add_hook_to_module(module, hook)
