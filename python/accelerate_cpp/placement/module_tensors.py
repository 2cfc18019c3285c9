"""The parameters and buffers of modules: listing them, and moving or replacing one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelerate_cpp.devices.memory import clear_device_cache
from accelerate_cpp.devices.selection import available_accelerators
from accelerate_cpp.devices.table import accelerators, kind_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.quantized_parameters import quantized, quantizes
from accelerate_cpp.plugins.enums import CustomDtype

__all__ = [
    "as_device",
    "as_dtype",
    "dtype_byte_size",
    "get_non_persistent_buffers",
    "id_tensor_storage",
    "is_meta",
    "listed",
    "named_module_tensors",
    "offloading_from",
    "placed_parameter",
    "set_module_tensor_to_device",
    "slot_of",
    "walk",
]

TiedTensors = MutableMapping[int, dict[torch.device, Tensor]]
"""For the address of a tensor that several modules use: the copies of it that there are, by device."""

_CUSTOM_BYTES = {CustomDtype.FP8: 1, CustomDtype.INT4: 1 / 2, CustomDtype.INT2: 1 / 4}
_ACCELERATOR = re.compile(r"(\w+)(?::(-?\d+))?")
_BITS = re.compile(r"[^\d](\d+)(_.*)?$")


def dtype_byte_size(dtype: torch.dtype | CustomDtype | str) -> float:
    """Bytes of one element: 4 for ``torch.float32``, one half for ``CustomDtype.INT4``.

    As in the original an element of ``torch.bool`` counts as one bit, and a name such as ``"float16"`` is understood.

    Raises:
        InvalidArgument: ``dtype`` is not a dtype.
    """
    if isinstance(dtype, CustomDtype):
        return _CUSTOM_BYTES[dtype]
    if dtype == torch.bool:
        return 1 / 8
    if isinstance(dtype, torch.dtype):
        return dtype.itemsize
    found = _BITS.search(str(dtype))
    if found is None:
        raise InvalidArgument(f"dtype={dtype!r}: expected a torch.dtype, a CustomDtype or a name such as 'float16'")
    return int(found[1]) // 8


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """``torch.float16`` from itself, ``"float16"`` or ``"torch.float16"``; ``None`` stays.

    Raises:
        InvalidArgument: torch has no such dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InvalidArgument(f"dtype={dtype!r}: expected a torch.dtype or its name, such as 'float16'")
    return found


def as_device(device: torch.device | str | int) -> torch.device:
    """``device`` as torch's object; a number is that of an accelerator.

    Raises:
        InvalidArgument: it is not a device, or not present.
    """
    if isinstance(device, (str, torch.device)) and str(device) in ("cpu", "meta"):
        return torch.device(device)
    present = dict(available_accelerators())
    name = f"{next(iter(present), 'cuda')}:{device}" if isinstance(device, int) else str(device)
    asked = _ACCELERATOR.fullmatch(name)
    known = asked is not None and asked[1] in {kind.type for kind in accelerators()}
    if asked is not None and known and not 0 <= int(asked[2] or 0) < present.get(asked[1], 0):
        seen = ", ".join(["cpu", *(f"{count} x {kind}" for kind, count in present.items())])
        raise InvalidArgument(f"device {device!r} ({name}) is not present; this process sees {seen}")
    try:
        return torch.device(name if asked is None or not known or kind_of(name).numbered else asked[1])
    except RuntimeError as error:
        raise InvalidArgument(f"device {device!r}: torch knows no such device ({error})") from error


def offloading_from(main: torch.device) -> tuple[str, ...]:
    """The places of weights that are offloaded where modules compute on ``main``: those that are not its memory."""
    return ("disk",) if kind_of(main).shares_memory_with_host else ("cpu", "disk")


def is_meta(tensor: Tensor) -> bool:
    """Whether ``tensor`` has a shape but no values."""
    return tensor.device.type == "meta"


def listed(names: Sequence[str], most: int = 10) -> str:
    """The first of ``names``, and how many more there are, as messages have them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def walk(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``module`` and all modules in it, each after what it is in, with what stands before the names of its tensors.

    This is ``""`` for ``module``, and else the name with a dot. A module with several names comes several times.
    """
    waiting: list[tuple[str, nn.Module]] = [("", module)]
    while waiting:
        prefix, found = waiting.pop()
        yield prefix, found
        children = [(f"{prefix}{name}.", child) for name, child in found._modules.items() if child is not None]
        waiting.extend(reversed(children))


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Equal for tensors that live in the same memory: device, address and size in bytes of the whole storage.

    Of a tensor that several processes hold together it is the part of this process.
    """
    local = getattr(tensor, "to_local", None)
    if local is not None:  # DTensor; the class takes long to import
        return id_tensor_storage(local())
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of the buffers that are not part of the state dict.

    Args:
        recurse: those of submodules too.
        fqns: with the names of the submodules in front.
    """
    if not recurse:
        return set(module._non_persistent_buffers_set)
    return {
        f"{prefix}.{name}" if fqns and prefix else name
        for prefix, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors: parameters, then buffers.

    Args:
        include_buffers: buffers too.
        recurse: those of submodules too.
        remove_non_persistent: leave out buffers that are not part of the state dict.
    """
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        skipped = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        yield from ((name, buffer) for name, buffer in module.named_buffers(recurse=recurse) if name not in skipped)


def slot_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor ``tensor_name`` (dotted) of ``module``, and the tensor's name there.

    Raises:
        InvalidArgument: there is no such parameter or buffer; the message has the nearest thing that there is.
    """
    path, _, name = tensor_name.rpartition(".")
    owner: Any = module
    for part in path.split(".") if path else ():
        child = getattr(owner, part, None)
        if not isinstance(child, nn.Module):
            raise InvalidArgument(
                f"{tensor_name!r}: {type(owner).__name__} has no module {part!r}; it has "
                f"{', '.join(map(repr, owner._modules)) or 'none'}"
            )
        owner = child
    if name not in owner._parameters and name not in owner._buffers:
        present = ", ".join(map(repr, [*owner._parameters, *owner._buffers])) or "none"
        raise InvalidArgument(
            f"{tensor_name!r}: {type(owner).__name__} has no parameter or buffer {name!r}; it has {present}"
        )
    return owner, name


def placed_parameter(old: Tensor, value: Tensor) -> nn.Parameter:
    """A parameter with the memory of ``value`` and everything else of ``old``: class, attributes, whether it trains."""
    trains = old.requires_grad and (value.is_floating_point() or value.is_complex())
    kind = type(old)
    plain = kind in (Tensor, nn.Parameter) or is_traceable_wrapper_subclass(value)
    if plain:
        new = nn.Parameter(value.detach(), requires_grad=trains)
    else:
        new = Tensor._make_subclass(kind, value.detach(), trains)  # type: ignore[assignment]
    if vars(old):
        vars(new).update(vars(old))
    return new


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: int | str | torch.device,
    value: Tensor | None = None,
    dtype: torch.dtype | str | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: TiedTensors | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Moves one tensor of ``module`` to ``device``, or puts ``value`` there in its place.

    A parameter becomes a new ``Parameter`` unless it is there already as asked.

    Args:
        tensor_name: of a parameter or buffer, dotted for one of a submodule.
        value: of the same shape as the tensor.
        dtype: what to convert to; integers and booleans stay. Without it ``value`` gets the tensor's dtype.
        fp16_statistics: the scales of the rows of a ``value`` in 8 bits, bitsandbytes' attribute ``SCB``.
        tied_params_map: copies that other modules use, by the address of the original: one on ``device`` is used, and a
            new one is added.
        non_blocking: do not wait for a copy from pinned memory.
        clear_cache: afterwards return memory that torch keeps for later to the accelerator.

    Raises:
        InvalidArgument: there is no such tensor or device; ``value`` has another shape; or the tensor has no values
            (it is on the meta device) and none are given.
    """
    owner, name = slot_of(module, tensor_name)
    target = as_device(device)
    is_buffer = name in owner._buffers
    old = owner._buffers[name] if is_buffer else owner._parameters[name]
    wanted = _wanted_dtype(tensor_name, old, target, value, as_dtype(dtype))
    for source in (value, old):
        shared = _shared(source, target, tied_params_map)
        if shared is not None:
            _put(owner, name, shared, is_buffer)
            return
    if value is not None and old is not None and target.type != "meta" and quantizes(old):
        converted = value.to(wanted) if _converts(value) else value
        _put(owner, name, quantized(old, converted, target, fp16_statistics), is_buffer)
        return
    source = old if value is None else value
    assert source is not None
    new = source.detach().to(device=target, dtype=wanted, non_blocking=non_blocking)
    if old is not None and not is_buffer:
        unchanged = value is None and new.data_ptr() == old.data_ptr() and new.device == old.device
        new = old if unchanged and new.dtype == old.dtype else placed_parameter(old, new)
    if fp16_statistics is not None and target.type != "meta":
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    _put(owner, name, new, is_buffer)
    for source in (old, value):
        _remember(source, target, new, tied_params_map)
    if clear_cache and target.type not in ("cpu", "meta"):
        clear_device_cache()


def _wanted_dtype(
    tensor_name: str, old: Tensor | None, target: torch.device, value: Tensor | None, dtype: torch.dtype | None
) -> torch.dtype:
    """The dtype that the tensor gets; refuses what cannot be put there."""
    if value is None:
        if old is None:
            raise InvalidArgument(f"{tensor_name!r} is None and has nothing to move: pass its value")
        if is_meta(old) and target.type != "meta":
            raise InvalidArgument(
                f"{tensor_name!r} is on the meta device and has no values: pass the value to put on {target}"
            )
        return old.dtype if dtype is None or not _converts(old) else dtype
    if not isinstance(value, Tensor):
        raise InvalidArgument(f"{tensor_name!r}: expected a tensor as its value, found a {type(value).__name__}")
    if old is not None and old.shape != value.shape:
        raise InvalidArgument(
            f'Trying to set a tensor of shape {value.shape} in "{tensor_name}" (which has shape {old.shape}), this '
            "looks incorrect: is it the checkpoint of a model with another configuration?"
        )
    if dtype is None:
        return value.dtype if old is None else old.dtype
    return dtype if _converts(value) else value.dtype


def _converts(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _put(owner: nn.Module, name: str, tensor: Tensor, is_buffer: bool) -> None:
    if is_buffer:
        owner._buffers[name] = tensor
    else:
        owner._parameters[name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)


def _address(tensor: Tensor | None, tied: TiedTensors | None) -> int:
    """Where ``tensor`` lies, if ``tied`` asks for that; else 0, where tensors without memory lie, too."""
    return tensor.data_ptr() if tied and tensor is not None and not is_meta(tensor) else 0


def _shared(tensor: Tensor | None, device: torch.device, tied: TiedTensors | None) -> Tensor | None:
    address = _address(tensor, tied)
    return tied.get(address, {}).get(device) if address and tied else None


def _remember(tensor: Tensor | None, device: torch.device, copy: Tensor, tied: TiedTensors | None) -> None:
    address = _address(tensor, tied)
    if address and tied and address in tied:
        tied[address].setdefault(device, copy)
