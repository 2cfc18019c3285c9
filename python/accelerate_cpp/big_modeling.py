"""Models that are larger than a device: building them without values, and running them on several devices."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
)
from accelerate_cpp.placement.align_devices import SkipKeys
from accelerate_cpp.placement.checkpoint_loading import load_checkpoint_in_model
from accelerate_cpp.placement.device_map import check_device_map, choose_device_map
from accelerate_cpp.placement.empty_init import init_empty_weights, init_on_device
from accelerate_cpp.placement.model_dispatch import Device, dispatch_model, values_of, write_missing
from accelerate_cpp.placement.module_tensors import as_device
from accelerate_cpp.placement.offload import Folder, OffloadedWeightsLoader
from accelerate_cpp.placement.workload import Workload

__all__ = [
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]

__getattr__ = lending("big_modeling")

_CASTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keeps the weights of ``model`` on the CPU, and moves those of each module to a device for its forward pass.

    Args:
        execution_device: the device of the forward passes; by default that of the first parameter.
        offload_buffers: offload buffers, too; otherwise they stay on the device.
        state_dict: the weights; by default those of ``model``.
        preload_module_classes: classes of modules that read weights of their submodules directly; the weights of such a
            module and its submodules are loaded and released together.

    Returns:
        ``model``, whose own tensors no longer have values.

    Raises:
        InvalidArgument: the device is not present, or there are no values to keep.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from accelerate_cpp import cpu_offload
        >>> model = cpu_offload(nn.Linear(2, 1), execution_device=torch.device("cpu"))
        >>> model.weight.device  # the values are loaded while the layer runs
        device(type='meta')
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    device = _first_device(model) if execution_device is None else execution_device
    weights = values_of(model, "pass them as state_dict") if state_dict is None else state_dict
    return _offload(model, device, offload_buffers, weights, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: Folder,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> nn.Module:
    """Keeps the weights of ``model`` in files, and moves those of each module to a device for its forward pass.

    Args:
        offload_dir: a folder, which is created; weights that it already contains are not written again.
        execution_device: the device of the forward passes; by default that of the first parameter.
        offload_buffers: offload buffers, too; otherwise they stay on the device.
        preload_module_classes: classes of modules that read weights of their submodules directly; the weights of such a
            module and its submodules are loaded and released together.

    Returns:
        ``model``, whose own tensors no longer have values.

    Raises:
        InvalidArgument: the device is not present; there are no values to write; the folder contains another model.
        SystemFailure: the disk is full, or the system refused something else.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from accelerate_cpp import disk_offload
        >>> model = disk_offload(nn.Linear(2, 1), "offload", execution_device=torch.device("cpu"))
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    device = _first_device(model) if execution_device is None else execution_device
    write_missing(model.state_dict(), offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, device, offload_buffers, weights, preload_module_classes)


def _first_device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _offload(
    model: nn.Module,
    device: Device,
    offload_buffers: bool,
    weights: Mapping[str, Tensor],
    preload_module_classes: Sequence[str] | None,
) -> nn.Module:
    place = as_device(device)
    if place.type != "cpu" and not isinstance(weights, OffloadedWeightsLoader):
        weights = OffloadedWeightsLoader(weights)  # it can copy them ahead
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=place,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    return model


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keeps ``model`` on the CPU until its forward pass, which moves the whole model to a device, where it stays.

    For models that take turns and are each run several times.

    Args:
        execution_device: by default the accelerator of this process, if it has one.
        prev_module_hook: the hook that this function returned for the model that runs before this one; that model is
            moved back to the CPU first.

    Returns:
        ``model``, and a hook that moves it back or removes itself.

    Raises:
        InvalidArgument: the device is not present.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from accelerate_cpp import cpu_offload_with_hook
        >>> encoder, encoder_hook = cpu_offload_with_hook(nn.Linear(2, 2), execution_device="cpu")
        >>> decoder, decoder_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu", prev_module_hook=encoder_hook)
        >>> decoder(encoder(torch.ones(1, 2))).shape  # the encoder leaves the device when the decoder comes
        torch.Size([1, 2])
        >>> decoder_hook.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: Folder,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    workload: Workload | None = None,
) -> nn.Module:
    """Loads a checkpoint into ``model``, which may be on the meta device, and dispatches its modules to their devices.

    Args:
        checkpoint: as :func:`load_checkpoint_in_model` takes it.
        device_map: the device of each module, or the method that chooses it: ``"auto"``, ``"balanced"``,
            ``"balanced_low_0"`` or ``"sequential"``, see :func:`accelerate_cpp.utils.choose_device_map`. Without it,
            the model is loaded but not dispatched.
        max_memory: the memory of the devices for these methods, as :func:`get_max_memory` takes it.
        no_split_module_classes: names of the classes of modules that are not split.
        offload_folder: the folder for weights on the disk.
        offload_buffers: buffers of offloaded modules are offloaded, too.
        dtype: the dtype to which weights are converted.
        offload_state_dict: has no effect; see :func:`load_checkpoint_in_model`.
        skip_keys: keyword arguments and entries of outputs that are not moved.
        preload_module_classes: classes of modules that read weights of their submodules directly; the weights of such a
            module and its submodules are loaded and released together.
        force_hooks: attach hooks even if the model is on a single device.
        strict: refuse a checkpoint that lacks weights or has additional ones.
        full_state_dict: as :func:`load_checkpoint_in_model` takes it.
        broadcast_from_rank0: as :func:`load_checkpoint_in_model` takes it.
        workload: what the chosen map leaves room for in addition to the weights.

    Raises:
        InvalidArgument: ``device_map`` is another string; also the errors of the functions that this one calls.
        CheckpointError: a file is missing, damaged or cut short.
        SystemFailure: the disk is full, or the system refused something else.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from accelerate_cpp import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
        >>> Accelerator().save_model(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), "weights")
        >>> with init_empty_weights():
        ...     model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model = load_checkpoint_and_dispatch(model, "weights", device_map={"": "cpu"})
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    if isinstance(device_map, str):
        device_map = choose_device_map(
            model,
            device_map,
            max_memory,
            no_split_module_classes,
            dtype,
            offload_buffers=offload_buffers,
            workload=workload,
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Iterable[str] | None = None,
    skip_modules_classes: type[nn.Module] | Iterable[type[nn.Module]] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keeps the weights of the linear and convolutional layers in ``module`` in a small dtype; see
    :class:`LayerwiseCastingHook`.

    Args:
        storage_dtype: such as ``torch.float8_e4m3fn``.
        compute_dtype: the dtype to which they are converted for a forward pass.
        skip_modules_pattern: regular expressions; modules with matching names are left as they are.
        skip_modules_classes: modules of these classes are also left as they are.
        non_blocking: do not wait for conversions.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    classes = [skip_modules_classes] if isinstance(skip_modules_classes, type) else skip_modules_classes or ()
    # Attention reads the weights of one of its linear layers without calling the layer.
    skipped: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, *classes)
    compiled = [re.compile(pattern) for pattern in patterns]
    waiting: list[tuple[str, nn.Module]] = [("", module)]
    while waiting:
        name, found = waiting.pop()
        if isinstance(found, skipped) or any(pattern.search(name) for pattern in compiled):
            continue
        if isinstance(found, _CASTED):
            add_hook_to_module(found, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        else:
            waiting += [(f"{name}.{label}" if name else label, child) for label, child in found.named_children()]
