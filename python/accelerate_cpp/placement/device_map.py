"""Device maps: the assignment of the parts of a model to devices.

A device map has names of modules (or of tensors beside them) as keys and devices as values: numbers of accelerators,
``"cpu"``, ``"mps"`` or ``"disk"``. A name includes everything in it; ``""`` is the whole model. The decisions are made
in :mod:`accelerate_cpp.placement.first_fit` and :mod:`accelerate_cpp.placement.fitting`.
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
from accelerate_cpp.placement.device_memory import Memory, get_max_memory, usable_memory
from accelerate_cpp.placement.first_fit import Placement, Room, device_of
from accelerate_cpp.placement.map_plan import MapPlan, rooms_of
from accelerate_cpp.placement.module_sizes import Dtype, Size
from accelerate_cpp.placement.module_tensors import listed, walk
from accelerate_cpp.placement.workload import Workload

__all__ = [
    "check_device_map",
    "choose_device_map",
    "clean_device_map",
    "get_module_size_with_ties",
    "infer_auto_device_map",
]

_logger = logging.getLogger(__name__)

Device = int | str | torch.device
AnyMap = TypeVar("AnyMap", bound=MutableMapping[str, Any])

_MIXED = object()
_WAYS = ("auto", "balanced", "balanced_low_0", "sequential")


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
    *,
    workload: Workload | None = None,
) -> OrderedDict[str, int | str]:
    """A device map for ``model``: devices are filled one after the other, in the order of its modules.

    A module that does not fit is split into its parts, as far as it may be; what still does not fit goes to the next
    device, and at last to ``"disk"``. On the first accelerator and on the CPU there stays room for the largest layer
    that comes later, as those that are offloaded are brought there one by one. Modules that share parameters go
    together. Where that would offload a part of a model that fits on the accelerators in another way, it is shared out
    in that way. Nothing is moved: the model may be on the meta device.

    Args:
        max_memory: room of devices, as :func:`get_max_memory` takes it; ``None`` is what is free now.
        no_split_module_classes: names of the classes of modules that are not split, such as blocks with a residual
            connection.
        dtype: the dtype to which the weights will be converted.
        special_dtypes: other dtypes for some of them, by name.
        verbose: print each decision.
        clean_result: put parts that go to one device under the name of their module.
        offload_buffers: whether buffers are offloaded, too; otherwise a warning is logged if there is no room for them.
        fallback_allocation: give a device that the next module is too large for the first later one that fits.
        workload: leave room for activations and caches, too.

    Raises:
        InvalidArgument: ``max_memory`` cannot be used, or what ``workload`` needs is not known.

    Example:
        >>> from torch import nn
        >>> from accelerate_cpp import infer_auto_device_map
        >>> model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3)))  # 440 bytes each
        >>> dict(infer_auto_device_map(model, max_memory={"cpu": 900, "disk": 10_000}))  # keeps room for one
        {'0': 'cpu', '1': 'disk', '2': 'disk'}
    """
    plan = MapPlan(model, no_split_module_classes, dtype, special_dtypes, workload, "infer_auto_device_map")
    memory = plan.spared(get_max_memory(max_memory))
    result = plan.first_fit(memory, fallback_allocation, print if verbose else None)
    return _devices(plan.fit_instead(result, memory), memory, clean_result, offload_buffers)


def choose_device_map(
    model: nn.Module,
    way: str = "auto",
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
    *,
    workload: Workload | None = None,
) -> OrderedDict[str, int | str]:
    """The device map for ``device_map=way``, for example in ``load_checkpoint_and_dispatch``.

    Whatever the way, nothing is offloaded if a fit on the accelerators was found; what does not fit there is offloaded
    from the end of the model on, as :func:`infer_auto_device_map` does it.

    - ``"balanced"``: neighbours stay together, and the largest load is as small as it can be, or at most 5 % above the
      larger of the mean load and the largest part that cannot be split, if fewer modules are split then.
    - ``"auto"``: :func:`infer_auto_device_map` with the room that :func:`get_balanced_memory` gives; the last
      accelerator gets what remains. If that offloads something, as ``"balanced"``.
    - ``"balanced_low_0"``: the same, but the first accelerator is left as free as possible.
    - ``"sequential"``: accelerators are filled one after the other.

    Args:
        max_memory: room of devices, as :func:`get_max_memory` takes it; ``None`` is what is free now, and of an only
            GPU nine tenths of it, unless the way is ``"sequential"``.
        no_split_module_classes: names of the classes of modules that are not split.
        dtype: the dtype to which the weights will be converted.
        special_dtypes: other dtypes for some of them, by name.
        offload_buffers: whether buffers are offloaded, too; otherwise a warning is logged if there is no room for them.
        workload: leave room for activations and caches, too.

    Raises:
        InvalidArgument: there is no such way, ``max_memory`` cannot be used, or what ``workload`` needs is not known.
    """
    if way not in _WAYS:
        raise InvalidArgument(f"device_map={way!r}: expected a mapping or one of {', '.join(map(repr, _WAYS))}")
    plan = MapPlan(model, no_split_module_classes, dtype, special_dtypes, workload, f"device_map={way!r}")
    memory = plan.spared(get_max_memory(max_memory) if way == "sequential" else usable_memory(max_memory))
    result = plan.fit(memory) if way == "balanced" else None
    if result is None:
        room = memory if way == "sequential" else plan.lowered(memory, low_zero=way == "balanced_low_0")
        result = plan.first_fit(room)
        result = plan.fit_instead(result, *([room, memory] if way == "balanced_low_0" else [memory]))
    return _devices(result, memory, True, offload_buffers)


def _devices(result: Placement, memory: Memory, clean: bool, offload_buffers: bool) -> OrderedDict[str, Any]:
    if not offload_buffers:
        _tell_of_buffers(result, rooms_of(memory))
    if result.needed:
        needed = ", ".join(f"{device}: {size} bytes" for device, size in result.needed.items())
        _logger.info(
            "insufficient memory: nothing was placed on these devices; the next module would have needed (%s)", needed
        )
    devices: OrderedDict[str, Any] = OrderedDict(result.devices)
    if clean:
        clean_device_map(devices)
    return devices


def _tell_of_buffers(result: Placement, rooms: Sequence[Room]) -> None:
    """Warns if no accelerator has room for the buffers of offloaded layers."""
    buffers = sum(size for device, size in result.buffers.items() if device in ("cpu", "disk"))
    gpus = [room for room in rooms if room.device not in ("cpu", "disk")]
    fits = any(room.size is not None and room.size >= buffers + result.used[room.device] for room in gpus)
    if buffers and gpus and not fits:
        warnings.warn(
            f"the layers that are offloaded have {buffers} bytes of buffers, which stay on the accelerators, and none "
            "has room for them; with offload_buffers=True they are offloaded, too",
            stacklevel=4,
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
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {listed(unknown)}; "
            f"{type(model).__name__} has no modules with these names, so they have no effect",
            stacklevel=2,
        )
