"""Quantization of models by bitsandbytes: linear layers whose weights have 8 or 4 bits."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from accelerate_cpp.config.libraries import is_installed
from accelerate_cpp.devices.selection import available_devices
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.placement.checkpoint_loading import NOT_USED
from accelerate_cpp.placement.checkpoint_placing import Loading
from accelerate_cpp.placement.checkpoint_reading import open_checkpoint
from accelerate_cpp.placement.device_map import check_device_map, choose_device_map
from accelerate_cpp.placement.first_fit import device_of, is_in_one_of
from accelerate_cpp.placement.model_dispatch import dispatch_model
from accelerate_cpp.placement.module_tensors import as_device, is_meta, listed, named_module_tensors, offloading_from
from accelerate_cpp.placement.offload import FolderWriter
from accelerate_cpp.placement.quantized_parameters import quantizes
from accelerate_cpp.placement.tied_parameters import find_tied_parameters
from accelerate_cpp.quantization.layers import kept_by_default, layers_replaced, quantizable_layers
from accelerate_cpp.quantization.options import BnbQuantizationConfig

__all__ = ["BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"]

_logger = logging.getLogger(__name__)

Folder = str | os.PathLike[str]
Device = int | str | torch.device


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Whether a layer of ``model`` is bitsandbytes' ``Linear4bit``. Does not import bitsandbytes."""
    library: Any = sys.modules.get("bitsandbytes")
    return library is not None and any(isinstance(module, library.nn.Linear4bit) for module in model.modules())


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: Folder | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: Folder | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Puts layers of bitsandbytes in place of the linear ones of ``model``, and quantizes their weights.

    A model on the meta device gets its weights from a checkpoint, and each is quantized as it is read. If the model
    has values already, these are quantized. The head and modules that share parameters are left out, or the modules
    that ``skip_modules`` of the configuration names. What is left out is converted to ``torch_dtype`` of the
    configuration, or to fp32.

    Args:
        weights_location: a checkpoint, as :func:`load_checkpoint_in_model` takes it.
        device_map: where modules go, by name, or how that is chosen; see :func:`load_checkpoint_and_dispatch`. By
            default all go to the current accelerator, or to the CPU if there is none. Layers that a map by name
            offloads, to the disk or from an accelerator to the CPU, are not quantized.
        no_split_module_classes: names of the classes of modules that stay whole, for a map that is chosen.
        max_memory: room of devices, for a map that is chosen.
        offload_folder: for what is on the disk.
        offload_state_dict: has no effect; see :func:`load_checkpoint_in_model`.

    Returns:
        ``model``, with its layers replaced, and on its devices.

    Raises:
        MissingLibrary: bitsandbytes is not installed, or too old.
        InvalidArgument: it does not work on a device; there is no checkpoint, or one of another model; a chosen map
            would offload something.
        CheckpointError: a file of the checkpoint is damaged.
    """
    config = bnb_quantization_config
    _require_library(config)
    loads = _loads(model, weights_location)
    kept = kept_by_default(model) if config.skip_modules is None else config.skip_modules
    layers = quantizable_layers(model, [*kept, *(config.keep_in_fp32_modules or ())])
    places = _device_map(model, layers, config, device_map, no_split_module_classes, max_memory)
    main, away = _main_device(places)
    _require_device(main)
    layers = [name for name in layers if device_of(places, f"{name}.weight") not in away]
    if not layers:
        _logger.warning("%s has no linear layer to quantize beside %s", type(model).__name__, listed(kept))
    with layers_replaced(model, layers, config):
        if loads is None:
            _convert(model, places, config)
        else:
            _load(model, loads, places, config, offload_folder)
    model.is_loaded_in_4bit = config.load_in_4bit  # type: ignore[assignment]
    model.is_loaded_in_8bit = config.load_in_8bit  # type: ignore[assignment]
    return dispatch_model(model, places, offload_dir=offload_folder)


def _loads(model: nn.Module, weights_location: Folder | None) -> Folder | None:
    """The checkpoint to read; ``None`` if ``model`` has values already."""
    kind = type(model).__name__
    if any(is_meta(tensor) for tensor in model.parameters()):
        if weights_location is None:
            raise InvalidArgument(
                f"load_and_quantize_model: {kind} is on the meta device and has no values; expected weights_location, "
                "a checkpoint to load them from"
            )
        return weights_location
    if weights_location is not None:
        _logger.warning("%s has values, which are quantized; %s is not read", kind, weights_location)
    return None


def _require_library(config: BnbQuantizationConfig) -> None:
    if not is_installed("bitsandbytes", at_least="0.37.2" if config.load_in_8bit else "0.39.0"):
        raise MissingLibrary(
            f"load_and_quantize_model: {8 if config.load_in_8bit else 4}-bit weights need the Python package "
            "bitsandbytes 0.39 or later, which is not installed; install it (pip install bitsandbytes)"
        )


def _require_device(device: torch.device) -> None:
    known = getattr(importlib.import_module("bitsandbytes"), "supported_torch_devices", {"cuda"})
    if device.type not in known:
        raise InvalidArgument(
            f"load_and_quantize_model: the bitsandbytes that is installed does not work on {device}, but on "
            f"{', '.join(sorted(known))}; upgrade it (pip install -U bitsandbytes), or choose another device_map"
        )


def _current_device() -> Device:
    """The accelerator of this process, else the CPU."""
    kinds = available_devices()
    if not kinds:
        return "cpu"
    return kinds[0].current() if kinds[0].numbered else kinds[0].type


def _main_device(places: Mapping[str, Device]) -> tuple[torch.device, tuple[str, ...]]:
    """Where modules compute, and the places from which they are brought there."""
    devices = list(places.values())
    main = next((device for device in devices if device not in ("cpu", "disk")), "cpu")
    return as_device(main), offloading_from(as_device(main))


def _device_map(
    model: nn.Module,
    layers: Collection[str],
    config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Device] | None,
    whole: str | Collection[str] | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> Mapping[str, Device]:
    if device_map is None:
        return {"": _current_device()}
    if not isinstance(device_map, str):
        check_device_map(model, device_map)
        return dict(device_map)
    weights = {f"{name}.weight" for name in layers}
    others = {
        name: _dtype_of(name, config)
        for name, tensor in named_module_tensors(model, recurse=True)
        if name not in weights and tensor.is_floating_point()
    }
    chosen = choose_device_map(model, device_map, max_memory, whole, config.target_dtype, others)
    _, away = _main_device(chosen)
    offloaded = [name or "the model" for name, device in chosen.items() if device in away]
    if offloaded:
        raise InvalidArgument(
            f"device_map={device_map!r}: {listed(offloaded)} would be offloaded, but bitsandbytes layers cannot be "
            "offloaded; give the devices more memory with max_memory, or pass a mapping: layers that it offloads are "
            "not quantized"
        )
    return chosen


def _dtype_of(name: str, config: BnbQuantizationConfig) -> torch.dtype:
    """What a floating-point tensor that is not quantized is converted to."""
    if is_in_one_of(name, config.keep_in_fp32_modules or ()):
        return torch.float32
    assert isinstance(config.torch_dtype, torch.dtype)
    return config.torch_dtype


def _load(
    model: nn.Module,
    checkpoint: Folder,
    places: Mapping[str, Device],
    config: BnbQuantizationConfig,
    offload_folder: Folder | None,
) -> None:
    """Loads a checkpoint, tensor by tensor."""
    on_disk = "disk" in places.values()
    if on_disk and offload_folder is None:
        raise InvalidArgument("device_map puts modules on the disk: pass an offload_folder for their weights")
    ties = find_tied_parameters(model)
    in_fp32 = config.keep_in_fp32_modules or ()
    loading = Loading(model, ties, places, _dtype_of("", config), in_fp32, offload_buffers=False)
    files = open_checkpoint(checkpoint)
    unused = loading.check(files, strict=False)
    if loading.lacking:
        raise InvalidArgument(
            f"weights_location={str(checkpoint)!r} lacks {listed(loading.lacking)}; expected a checkpoint of "
            f"{type(model).__name__}"
        )
    if unused:
        _logger.warning(NOT_USED, checkpoint, type(model).__name__, listed(unused))
    with FolderWriter(offload_folder) if on_disk and offload_folder is not None else nullcontext() as writer:
        loading.load(files, writer)


@torch.no_grad()
def _convert(model: nn.Module, places: Mapping[str, Device], config: BnbQuantizationConfig) -> None:
    """Quantizes the values that are there, and converts the others."""
    for name, tensor in named_module_tensors(model, recurse=True, remove_non_persistent=True):
        if not quantizes(tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.to(_dtype_of(name, config))
    for name, module in model.named_modules():
        weight: Any = module._parameters.get("weight")
        if weight is not None and quantizes(weight):
            place = device_of(places, f"{name}.weight")
            assert place is not None
            module.weight = weight.to(as_device(place))
