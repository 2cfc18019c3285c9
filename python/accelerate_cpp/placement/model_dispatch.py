"""Putting a model onto several devices: where its offloaded weights are, and the hooks that it needs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.align_devices import SkipKeys
from accelerate_cpp.placement.attach_hooks import attach_align_device_hook_on_blocks
from accelerate_cpp.placement.device_map import check_device_map
from accelerate_cpp.placement.first_fit import device_of
from accelerate_cpp.placement.module_hooks import guard_moves
from accelerate_cpp.placement.module_tensors import TiedTensors, as_device, is_meta, listed, offloading_from, slot_of
from accelerate_cpp.placement.offload import (
    INDEX_NAME,
    Folder,
    OffloadedWeightsLoader,
    offload_state_dict,
    read_offload_index,
)
from accelerate_cpp.placement.tied_parameters import find_tied_parameters, retie_on_each_device

__all__ = ["Dispatch", "dispatch_model", "move", "values_of", "write_missing"]

_logger = logging.getLogger(__name__)

Device = int | str | torch.device


def values_of(model: nn.Module, advice: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """The parameters and saved buffers of ``model``, or those of ``names``, on the CPU; those there are no copies.

    Raises:
        InvalidArgument: one has no values; the message ends with ``advice``.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    tensors = {
        name: value for name, value in state.items() if isinstance(value, Tensor) and (names is None or name in names)
    }
    empty = [name for name, tensor in tensors.items() if is_meta(tensor)]
    if empty:
        raise InvalidArgument(f"there are no values of {listed(empty)}, which should be on the CPU; {advice}")
    return {
        name: tensor if tensor.device.type == "cpu" else tensor.detach().to("cpu") for name, tensor in tensors.items()
    }


def write_missing(state_dict: Mapping[str, Any], folder: Folder) -> None:
    """Writes the tensors of ``state_dict`` that the offload folder ``folder`` lacks.

    Raises:
        InvalidArgument: the folder is of another model, or what it lacks has no values.
        SystemFailure: the disk is full, or the system refused something else.
    """
    there = read_offload_index(folder) if (Path(folder) / INDEX_NAME).is_file() else {}
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, Tensor)}
    wrong = [
        f"{name} has {tuple(tensor.shape)}, in the folder {tuple(there[name]['shape'])}"
        for name, tensor in tensors.items()
        if "shape" in there.get(name, {}) and tuple(there[name]["shape"]) != tuple(tensor.shape)
    ]
    if wrong:
        raise InvalidArgument(f"{folder} has weights of another model ({listed(wrong)}): choose another folder")
    missing = {name: tensor for name, tensor in tensors.items() if name not in there}
    empty = [name for name, tensor in missing.items() if is_meta(tensor)]
    if empty:
        raise InvalidArgument(
            f"there are no values of {listed(empty)}, neither in the model nor in {folder}; load its checkpoint with "
            "the same offload folder before"
        )
    if missing:
        offload_state_dict(folder, missing)


def move(model: nn.Module, device: torch.device) -> None:
    """Moves all of ``model``; ``InvalidArgument`` if something of it has no values."""
    empty = [name for name, value in model.state_dict().items() if isinstance(value, Tensor) and is_meta(value)]
    if empty and device.type != "meta":
        raise InvalidArgument(f"there are no values of {listed(empty)} to put on {device}: load a checkpoint before")
    model.to(device)


class Dispatch:
    """Putting a model onto several devices.

    Args:
        device_map: the device of each part.
        main_device: where what is offloaded runs; by default the first accelerator of the map, else the CPU.

    Raises:
        InvalidArgument: a device is not present.
    """

    def __init__(self, model: nn.Module, device_map: Mapping[str, Device], main_device: Device | None) -> None:
        self._model = model
        places = list(dict.fromkeys(device_map.values()))
        accelerators = [device for device in places if device not in ("cpu", "disk")]
        self._main = (accelerators or ["cpu"])[0] if main_device is None else main_device
        for device in (*places, self._main):
            if device != "disk":
                as_device(device)
        away = offloading_from(as_device(self._main))
        self._offload = {name: device in away for name, device in device_map.items()}
        self._devices = {name: self._main if self._offload[name] else device for name, device in device_map.items()}
        self._devices.setdefault("", self._main)
        self._named = {
            place: [name or "the model" for name, device in device_map.items() if device == place and place in away]
            for place in ("cpu", "disk")
        }
        places_of = {name: device_of(device_map, name) for name in model.state_dict()}
        self._on_cpu = [name for name, device in places_of.items() if device == "cpu" and "cpu" in away]
        self._on_disk = [name for name, device in places_of.items() if device == "disk"]
        self._weights: OffloadedWeightsLoader | None = None

    def find_weights(
        self,
        state_dict: Mapping[str, Tensor] | None,
        offload_dir: Folder | None,
        offload_index: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        """Finds out where the offloaded weights are, and writes those for the disk.

        Raises:
            InvalidArgument: they are nowhere, or the folder is of another model.
        """
        if self._on_disk and offload_dir is None and offload_index is None:
            raise InvalidArgument(f"device_map puts {listed(self._named['disk'])} on the disk: pass an offload_dir")
        if self._on_cpu and state_dict is None:
            state_dict = values_of(self._model, "load a checkpoint before, or pass state_dict", self._on_cpu)
        if self._on_disk and offload_index is None and offload_dir is not None:
            state = self._model.state_dict()
            write_missing({name: state[name] for name in self._on_disk}, offload_dir)
        if self._on_disk or state_dict is not None:
            device = None if offload_index is None else as_device(self._main)
            folder = offload_dir if self._on_disk else None
            self._weights = OffloadedWeightsLoader(state_dict, folder, offload_index, device)

    def attach(
        self,
        offload_buffers: bool,
        skip_keys: SkipKeys,
        preload_module_classes: Sequence[str] | None,
    ) -> None:
        """Attaches the hooks, which move what is to be moved."""
        ties = find_tied_parameters(self._model)
        originals = [slot_of(self._model, group[0]) for group in ties]
        shared = [tensor for owner, name in originals if (tensor := owner._parameters[name]) is not None]
        copies: TiedTensors = {tensor.data_ptr(): {} for tensor in shared if not is_meta(tensor)}
        attach_align_device_hook_on_blocks(
            self._model,
            execution_device=self._devices,
            offload=self._offload,
            offload_buffers=offload_buffers,
            weights_map=self._weights,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=copies,
        )
        # Only addresses of tensors that are kept stay theirs; others can become those of other tensors.
        kept = {} if self._weights is None else self._weights.state_dict
        addresses = {tensor.data_ptr() for tensor in kept.values()}
        for address in [address for address in copies if address not in addresses]:
            del copies[address]
        retie_on_each_device(self._model, ties)
        guard_moves(self._model)
        if any(self._offload.values()):
            _logger.info("offloaded between forward passes: %s", listed([*self._named["cpu"], *self._named["disk"]]))


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: SkipKeys = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Moves the modules of ``model`` to the devices in ``device_map``, and makes inputs and offloaded weights follow.

    What is on the disk, and on the CPU if the main device is another one, is brought to the main device for its forward
    pass. On one device only the model is just moved there.

    Args:
        main_device: by default the first accelerator in ``device_map``, else the CPU.
        state_dict: the weights of what is on the CPU; by default those of ``model``.
        offload_dir: the folder of what is on the disk; weights that it lacks are written.
        offload_index: of what is on the disk, instead of the one in ``offload_dir``; it may name safetensors files.
        offload_buffers: buffers of offloaded modules are offloaded, too; else they stay on the main device.
        skip_keys: entries of named arguments and outputs that are not moved.
        preload_module_classes: classes of modules that read weights of their submodules directly; the weights of such a
            module and its submodules are loaded and released together.
        force_hooks: give the model hooks, which move inputs, on one device, too.

    Returns:
        ``model``, with the map as ``hf_device_map``. While parts of it are offloaded, moving it raises an error.

    Raises:
        InvalidArgument: the map leaves out a tensor or names a device that is not present; there is no folder for what
            is on the disk, or one of another model; something that should be moved has no values.
        SystemFailure: the disk is full, or the system refused something else.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from accelerate_cpp import dispatch_model
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> model = dispatch_model(model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir="offload")
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 1])
    """
    check_device_map(model, device_map)
    places = set(device_map.values())
    if len(places) > 1 or force_hooks or "disk" in places:
        dispatch = Dispatch(model, device_map, main_device)
        dispatch.find_weights(state_dict, offload_dir, offload_index)
        dispatch.attach(offload_buffers, skip_keys, preload_module_classes)
    else:
        for device in places:
            move(model, as_device(device))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model
