"""Device maps: which part of a model goes to which device.

A device map has names of modules (or of tensors beside them) as keys and devices as values: numbers of accelerators,
``"cpu"``, ``"mps"`` or ``"disk"``. A name stands for everything in it; ``""`` for the whole model. What goes where is
decided in :mod:`accelerate_cpp.utils.placement`.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils.device_memory import get_max_memory
from accelerate_cpp.utils.fitting import fit_on_accelerators, offloads
from accelerate_cpp.utils.model_parts import survey
from accelerate_cpp.utils.module_sizes import Dtype, Measure, Size, class_names
from accelerate_cpp.utils.module_tensors import listed, walk
from accelerate_cpp.utils.placement import Placement, Room, device_of, place
from accelerate_cpp.utils.tied_parameters import warn_of_untied

__all__ = [
    "check_device_map",
    "clean_device_map",
    "get_module_size_with_ties",
    "infer_auto_device_map",
]

_logger = logging.getLogger(__name__)

Device = int | str | torch.device
AnyMap = TypeVar("AnyMap", bound=MutableMapping[str, Any])

_MIXED = object()


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> OrderedDict[str, int | str]:
    """A device map for ``model``: devices are filled one after the other, in the order of its modules.

    A module that does not fit is split into its parts, as far as it may be; what still does not fit goes to the next
    device, and at last to ``"disk"``. On the first accelerator and on the CPU there stays room for the largest layer
    that comes later, as those that are offloaded are brought there one by one. Modules that share parameters go
    together. Where that would offload a part of a model that fits on the accelerators in another way, it is shared out
    in that way. Nothing is moved: the model may be on the meta device.

    Args:
        max_memory: room of devices, as :func:`get_max_memory` takes it; ``None`` is what is free now.
        no_split_module_classes: names of the classes of modules that stay whole, such as blocks with a residual
            connection.
        dtype: what the weights will be converted to.
        special_dtypes: other dtypes for some of them, by name.
        verbose: print each decision.
        clean_result: put parts that go to one device under the name of their module.
        offload_buffers: whether buffers are offloaded, too; else a warning says if they have no room.
        fallback_allocation: give a device that the next module is too large for the first later one that fits.

    Raises:
        InvalidArgument: ``max_memory`` cannot be used.
    """
    rooms = _rooms(get_max_memory(max_memory))
    parts, ties, sizes = survey(model, Measure(dtype, special_dtypes), class_names(no_split_module_classes))
    warn_of_untied(model, ties, "infer_auto_device_map")
    tell = print if verbose else None
    result = place(parts, rooms, ties, sizes, fallback_allocation, tell)
    if offloads(result):
        result = fit_on_accelerators(parts, rooms, ties) or result
    if not offload_buffers:
        _tell_of_buffers(result, rooms)
    if result.needed:
        needed = ", ".join(f"{device}: {size} bytes" for device, size in result.needed.items())
        _logger.info("these devices got nothing, as the next module would have needed (%s)", needed)
    devices: OrderedDict[str, Any] = OrderedDict(result.devices)
    if clean_result:
        clean_device_map(devices)
    return devices


def _rooms(memory: Mapping[int | str, Size]) -> list[Room]:
    """The devices in order, the disk at last, which has no end."""
    unlimited = next((device for device, size in memory.items() if size is None), None)
    if unlimited is not None and unlimited != "disk":
        raise InvalidArgument(f"max_memory[{unlimited!r}] is None: expected a number of bytes or a text such as '10GB'")
    main = next((device for device in memory if device not in ("cpu", "disk")), None)
    reserving = {"mps"} if "mps" in memory else {main, "cpu"}
    rooms = [Room(device, size, device in reserving) for device, size in memory.items() if device != "disk"]
    return [*rooms, Room("disk", None)]


def _tell_of_buffers(result: Placement, rooms: Sequence[Room]) -> None:
    """Warns if offloaded layers have buffers for which no accelerator has room."""
    buffers = sum(size for device, size in result.buffers.items() if device in ("cpu", "disk"))
    gpus = [room for room in rooms if room.device not in ("cpu", "disk")]
    fits = any(room.size is not None and room.size >= buffers + result.used[room.device] for room in gpus)
    if buffers and gpus and not fits:
        warnings.warn(
            f"the layers that are offloaded have {buffers} bytes of buffers, which stay on the accelerators, and none "
            "has room for them; with offload_buffers=True they are offloaded, too",
            stacklevel=3,
        )


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: Size,
    module_sizes: Mapping[str, Size],
    modules_to_treat: Sequence[tuple[str, nn.Module | Tensor]],
) -> tuple[Size, list[str], list[nn.Module | Tensor]]:
    """Bytes of a module and of those that share parameters with it, which count once; their names, and these modules.

    Args:
        tied_params: names of the shared parameters in other modules.
        module_size: bytes of the module itself.
        module_sizes: bytes of modules and parameters by name.
        modules_to_treat: where the other modules are looked for.

    Raises:
        InvalidArgument: a parameter is in none of ``modules_to_treat``.
    """
    names: list[str] = []
    modules: list[nn.Module | Tensor] = []
    for parameter in tied_params:
        found = next((pair for pair in modules_to_treat if f"{parameter}.".startswith(f"{pair[0]}.")), None)
        if found is None:
            raise InvalidArgument(f"{parameter!r} of tied_params is in none of modules_to_treat")
        names.append(found[0])
        modules.append(found[1])
        module_size += module_sizes[found[0]] - module_sizes[parameter]
    return module_size, names, modules


def clean_device_map(device_map: AnyMap, module_name: str = "") -> AnyMap:
    """``device_map`` with one entry for each module whose parts all go to one device; it is changed, and returned.

    Args:
        module_name: look at the parts of this module only.
    """
    common: dict[str, object] = {}
    counts: dict[str, int] = {}
    prefix = f"{module_name}." if module_name else ""
    for name, device in device_map.items():
        for owner in _owners_within(name, prefix):
            counts[owner] = counts.get(owner, 0) + 1
            if common.setdefault(owner, device) != device:
                common[owner] = _MIXED
    cleaned: dict[str, Device] = {}
    for name, device in device_map.items():
        whole = [owner for owner in _owners_within(name, prefix) if counts[owner] > 1 and common[owner] is not _MIXED]
        if whole:
            cleaned[whole[-1]] = device
        else:
            cleaned.setdefault(name, device)
    device_map.clear()
    device_map.update(cleaned)
    return device_map


def _owners_within(name: str, prefix: str) -> list[str]:
    """The modules around ``name`` up to that of ``prefix``, the smallest first; none if it is elsewhere."""
    if not name.startswith(prefix):
        return []
    owners = []
    while len(name) > len(prefix):
        name = name.rpartition(".")[0]
        owners.append(name)
        if not name or f"{name}." == prefix:
            break
    return owners or [name]


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Checks that every parameter and every saved buffer of ``model`` has a device; warns of names that it lacks.

    Raises:
        InvalidArgument: some have none; the message names them.
    """
    tensors: list[str] = []
    known = {""}
    for prefix, module in walk(model):
        skipped = module._non_persistent_buffers_set
        tensors += [prefix + name for name, tensor in module._parameters.items() if tensor is not None]
        buffers = [name for name, buffer in module._buffers.items() if buffer is not None and name not in skipped]
        tensors += [prefix + name for name in buffers]
        known.update((prefix[:-1], *(prefix + name for name in skipped)))
    homeless = [name for name in tensors if device_of(device_map, name) is None]
    if homeless:
        raise InvalidArgument(f"device_map gives no device to {listed(homeless)}")
    known.update(tensors)
    unknown = [name for name in device_map if name not in known]
    if unknown:
        warnings.warn(f"device_map has names that {type(model).__name__} does not: {listed(unknown)}", stacklevel=2)
