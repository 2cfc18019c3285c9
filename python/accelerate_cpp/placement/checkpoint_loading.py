"""Loading checkpoints into models, tensor by tensor, each onto its device.

The headers of the files are checked before anything is changed. If loading fails later, tensors of the model that had
no values (those on the meta device) have none again; others are not restored, because that would need a second copy of
the model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate_cpp.comm.topology import process_index
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.checkpoint_placing import Loading
from accelerate_cpp.placement.checkpoint_reading import CheckpointFile, open_checkpoint
from accelerate_cpp.placement.first_fit import device_of
from accelerate_cpp.placement.module_tensors import as_device, as_dtype, is_meta, listed
from accelerate_cpp.placement.offload import FolderWriter
from accelerate_cpp.placement.tied_parameters import (
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    warn_of_untied,
)

__all__ = ["load_checkpoint_in_model", "load_state_dict"]

_logger = logging.getLogger(__name__)

NOT_USED = "some weights of %s were not used when initializing %s, which has no place for them: %s"
"""For the log, with the checkpoint, the class of the model and the names."""

DeviceMap = Mapping[str, int | str | torch.device]


def load_state_dict(checkpoint_file: str | os.PathLike[str], device_map: DeviceMap | None = None) -> dict[str, Any]:
    """The tensors of one file, in the safetensors format or of ``torch.save``; those on the CPU are mapped.

    Args:
        device_map: the devices of the tensors; those for ``"disk"`` and those without an entry stay on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged, or of another format.
        InvalidArgument: it was written for another library than torch, or a device is not present.
    """
    file = CheckpointFile(Path(checkpoint_file))
    placed: dict[str, Any] = {}
    for name in file:
        device = None if device_map is None else device_of(device_map, name)
        value = file.read(name)
        if device is not None and device != "disk" and isinstance(value, Tensor):
            value = value.to(as_device(device))
        placed[name] = value
    return placed


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Loads weights into ``model``, which may be on the meta device. At no time is there a second copy of the whole.

    Args:
        checkpoint: a file, the index of several files, or a folder with ``model.safetensors``, ``pytorch_model.bin`` or
            one index.
        device_map: where each module goes; ``"disk"`` writes it to ``offload_folder``. Without it tensors are loaded
            where they are, and to the CPU if they have no values.
        offload_folder: is created if necessary.
        dtype: the dtype to which weights are converted; by default that in ``model``. Integers and booleans are not
            converted.
        offload_state_dict: without effect. The original keeps weights for the CPU on the disk meanwhile to save memory,
            which is not needed here.
        offload_buffers: also offload buffers of modules on the disk; otherwise they stay on the CPU.
        keep_in_fp32_modules: names of modules that stay in fp32 with ``dtype=torch.float16``.
        offload_8bit_bnb: refused: bitsandbytes layers are not offloaded.
        strict: refuse a checkpoint that lacks weights or has additional ones; otherwise both are logged.
        full_state_dict: of a model whose parameters are spread over processes: the checkpoint has whole tensors.
        broadcast_from_rank0: of such a model: only the first process reads the checkpoint.

    Raises:
        InvalidArgument: checkpoint and model do not fit (missing or other weights with ``strict``, shapes); the device
            map leaves something out or names a device that is not present; there is no checkpoint.
        CheckpointError: a file is missing, damaged or cut short.
        SystemFailure: the disk is full, or the system refused something else.
        torch.OutOfMemoryError: a device has no room for a tensor.

    Example:
        >>> from torch import nn
        >>> from accelerate_cpp import Accelerator, load_checkpoint_in_model
        >>> trained, model = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> Accelerator().save_model(trained, "weights")
        >>> load_checkpoint_in_model(model, "weights")
        >>> bool((model.weight == trained.weight).all())
        True
    """
    if offload_8bit_bnb:
        raise InvalidArgument(
            "offload_8bit_bnb=True: layers of bitsandbytes are not offloaded; leave it out, and call "
            "load_and_quantize_model, which does not quantize the layers that device_map offloads"
        )
    ties = find_tied_parameters(model)
    warn_of_untied(model, ties, "load_checkpoint_in_model")
    if device_map is None and any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        _load_spread(model, checkpoint, strict, full_state_dict, broadcast_from_rank0)
        return
    on_disk = device_map is not None and "disk" in device_map.values()
    if on_disk and offload_folder is None:
        raise InvalidArgument("device_map puts modules on the disk: pass an offload_folder for their weights")
    if device_map is not None:
        check_tied_parameters_on_same_device(ties, device_map)
    files = open_checkpoint(checkpoint)
    if device_map is None and dtype is None and _converts_checkpoints(model):
        _load_by_torch(model, files, strict)
        return
    wanted = as_dtype(dtype)
    in_fp32 = keep_in_fp32_modules or () if wanted == torch.float16 else ()
    loading = Loading(model, ties, device_map, wanted, in_fp32, offload_buffers)
    unused = loading.check(files, strict)
    if unused:
        _logger.warning(NOT_USED, checkpoint, type(model).__name__, listed(unused))
    with FolderWriter(offload_folder) if on_disk and offload_folder is not None else nullcontext() as writer:
        loading.load(files, writer)
    if loading.empty:
        _logger.warning("%s lacks weights, which are still without values: %s", checkpoint, listed(loading.empty))


def _converts_checkpoints(model: nn.Module) -> bool:
    """Whether a module that is not torch's own changes the state that it loads, as for files of older versions."""
    return any(
        module._load_state_dict_pre_hooks
        or not getattr(type(module)._load_from_state_dict, "__module__", "").startswith("torch.")
        for module in model.modules()
    )


def _load_by_torch(model: nn.Module, files: Iterable[CheckpointFile], strict: bool) -> None:
    """Loads through ``load_state_dict`` of the model; its tensors are mapped, and therefore take no memory."""
    state_dict = {name: file.read(name) for file in files for name in file}
    without_values = any(is_meta(tensor) for tensor in [*model.parameters(), *model.buffers()])
    unused = model.load_state_dict(state_dict, strict=strict, assign=without_values).unexpected_keys
    if unused:
        kind = type(model).__name__
        _logger.warning(NOT_USED, ", ".join(str(file.path) for file in files), kind, listed(unused))


def _load_spread(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Loads into a model whose parameters several processes hold together. A collective."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state_dict: dict[str, Any] = {}
    if not broadcast_from_rank0 or process_index() == 0:
        state_dict = {name: file.read(name) for file in open_checkpoint(checkpoint) for name in file}
    options = StateDictOptions(
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=strict
    )
    set_model_state_dict(model, state_dict, options=options)
