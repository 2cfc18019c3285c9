"""The memory of devices for a model, and how much of it to use so that all are filled equally."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from accelerate_cpp.checkpoint.files import parse_size
from accelerate_cpp.devices.host_memory import available_bytes
from accelerate_cpp.devices.selection import available_devices
from accelerate_cpp.devices.table import accelerators
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.module_sizes import Dtype, Size, class_names, compute_module_sizes

__all__ = ["get_balanced_memory", "get_max_memory", "lowered", "named_devices", "usable_memory"]

_logger = logging.getLogger(__name__)

Memory = dict[int | str, Size]

# Share of a single GPU that is used by default: activations need the rest.
_PART_OF_ONLY_GPU = 0.9


def named_devices() -> list[str]:
    """The devices that maps do not number, in the order in which they are filled."""
    return [*(kind.type for kind in accelerators() if not kind.numbered), "cpu", "disk"]


def get_max_memory(max_memory: Mapping[int | str, int | str] | None = None) -> Memory:
    """Bytes by device: accelerators by their numbers, or as :func:`named_devices`, then ``"cpu"`` and ``"disk"``.

    Args:
        max_memory: bytes, or strings such as ``"10GB"`` and ``"5GiB"``; devices that are left out are not used. Without
            it, what is free now: of each accelerator, and of the machine's memory, or what its container leaves of it.

    Raises:
        InvalidArgument: a key is no such device, or a text is not a size.
    """
    if max_memory is None:
        return _free_memory()
    names = named_devices()
    unknown = [key for key in max_memory if not isinstance(key, int) and key not in names]
    if unknown:
        raise InvalidArgument(
            f"max_memory has the key {unknown[0]!r}: expected numbers of accelerators, {', '.join(map(repr, names))}"
        )
    numbers = sorted(key for key in max_memory if isinstance(key, int))
    count = sum(kind.count() for kind in available_devices()[:1] if kind.numbered)
    absent = [number for number in numbers if not 0 <= number < count]
    if absent:
        _logger.warning("max_memory has devices that are not present: %s; this process sees %d", absent, count)
    ordered: list[int | str] = [*numbers, *(key for key in names if key in max_memory)]
    return {key: _bytes(key, max_memory[key]) for key in ordered}


def _bytes(key: int | str, size: int | str) -> Size:
    if not isinstance(size, str):
        return size
    return parse_size(size, argument=f"max_memory[{key!r}]", small_b_is_bits=True)


def _free_memory() -> Memory:
    host, kinds = available_bytes(), available_devices()
    if not kinds:
        return {"cpu": host}
    kind = kinds[0]
    keys: Sequence[int | str] = range(kind.count()) if kind.numbered else (kind.type,)
    memory: Memory = {key: kind.free_bytes(number) for number, key in enumerate(keys)}
    return memory if kind.shares_memory_with_host else {**memory, "cpu": host}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> Memory:
    """``max_memory``, lowered so that a device map made with it fills all accelerators equally.

    Each but the last may hold an equal part of the model and a quarter more than one layer; the last takes the rest.

    Args:
        max_memory: as :func:`get_max_memory` takes it; ``None`` is what is free, of an only GPU nine tenths.
        no_split_module_classes: classes of modules that stay whole.
        dtype: what the weights will be converted to.
        special_dtypes: other dtypes for some of them, by name.
        low_zero: leave device 0 as free as possible, for what else there is to do on it.

    Raises:
        InvalidArgument: as :func:`get_max_memory` does.
    """
    memory = usable_memory(max_memory)
    if len(_gpus(memory)) <= 1:
        return memory
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    return lowered(memory, model, sizes, class_names(no_split_module_classes), low_zero)


def usable_memory(max_memory: Mapping[int | str, int | str] | None) -> Memory:
    """What :func:`get_max_memory` returns, but if there is only one GPU, nine tenths of its free memory."""
    memory = get_max_memory(max_memory)
    gpus = _gpus(memory)
    if max_memory is None and len(gpus) == 1:
        memory[gpus[0]] = int(memory[gpus[0]] * _PART_OF_ONLY_GPU)
        _logger.info("device %d: %g of what is free is for the model", gpus[0], _PART_OF_ONLY_GPU)
    return memory


def _gpus(memory: Memory) -> list[int]:
    return [device for device, size in memory.items() if isinstance(device, int) and size > 0]


def lowered(
    memory: Memory, model: nn.Module, sizes: Mapping[str, Size], whole: frozenset[str], low_zero: bool = False
) -> Memory:
    """``memory`` as :func:`get_balanced_memory` lowers it, for modules of these ``sizes``; it stays as it is."""
    memory = dict(memory)
    gpus = _gpus(memory)
    if len(gpus) <= 1:
        return memory
    shares = len(gpus) - 1 if low_zero else len(gpus)
    share = sizes[""] // shares + _margin(model, sizes, whole)
    for device in gpus[:-1]:
        if not (low_zero and device == 0):
            memory[device] = min(share, memory[device])
    if low_zero and 0 in memory:
        elsewhere = sum(memory.get(device, 0) for device in range(1, len(gpus)))
        memory[0] = min(max(0, sizes[""] - elsewhere), memory[0])
    return memory


def _margin(model: nn.Module, sizes: Mapping[str, Size], whole: frozenset[str]) -> int:
    """A quarter more than a layer: the mean one, or the largest of the blocks that stay whole, if that is larger."""
    blocks: dict[str, Size] = {}
    layers: list[Size] = []
    for name, module in model.named_modules():
        if name and name in sizes:
            blocks.setdefault(type(module).__name__, sizes[name])
            if not any(f"{name}.{child}" in sizes for child, _ in module.named_children()):
                layers.append(sizes[name])
    mean = int(sum(layers) / max(len(layers), 1))
    return int(1.25 * max(mean, *(blocks.get(kind, 0) for kind in whole), 0))
