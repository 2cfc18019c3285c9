"""Tensors of a module that are elsewhere between its forward passes: taking them away, bringing and releasing them.

Hooks call these functions and nothing else for that, so that an engine that brings tensors ahead of time can stand
here. A tensor that is away is on the meta device; only those are brought.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.module_tensors import TiedTensors, is_meta, placed_parameter, walk

__all__ = ["Brought", "Repeatable", "Slot", "bring", "release", "slots_of"]


class Slot(NamedTuple):
    """The place of one tensor.

    Attributes:
        tensors: the parameters or buffers of the module that has it.
        label: its name there.
        name: its name in the module whose slots these are.
    """

    tensors: dict[str, Any]
    label: str
    name: str


class Brought:
    """What one call of :func:`bring` has brought.

    Attributes:
        slots: where tensors were brought to, with what stood there before.
        copies: entries of the map of shared tensors that were added: address and device.
    """

    __slots__ = ("copies", "slots")

    def __init__(self) -> None:
        self.slots: list[tuple[Slot, Tensor]] = []
        self.copies: list[tuple[int, torch.device]] = []


class _Value(NamedTuple):
    """What :func:`bring` has put into a slot.

    Attributes:
        slot: where it is.
        away: what stood there before.
        source: in the weights.
        there: what was made of it.
    """

    slot: Slot
    away: Tensor
    source: Tensor
    there: Tensor


class Repeatable:
    """What :func:`bring` has put into a module without copying it, so that it can be put there again at once, as long
    as both the module and the weights have what they had.
    """

    __slots__ = ("_away", "_brought", "_device", "_parameters", "_values")

    def __init__(self, module: nn.Module, brought: Brought, values: list[_Value], device: object) -> None:
        self._parameters, self._brought, self._values, self._device = module._parameters, brought, values, device
        away = {value.slot.label: value.away for value in values}
        self._away = [away.get(label, tensor) for label, tensor in module._parameters.items()]

    @classmethod
    def of(
        cls, module: nn.Module, brought: Brought, weights: Mapping[str, Tensor], device: object
    ) -> Repeatable | None:
        """``None`` if something was copied or is not a parameter of ``module`` itself, or a new one gets a gradient."""
        values = []
        for slot, old in brought.slots:
            value = _Value(slot, old, weights[slot.name], slot.tensors[slot.label])
            is_new = value.there is not value.source
            copied = is_new and value.there.data_ptr() != value.source.data_ptr()
            if slot.tensors is not module._parameters or copied or (is_new and value.there.requires_grad):
                return None
            values.append(value)
        return None if brought.copies or not values else cls(module, brought, values, device)

    def bring(self, module: nn.Module, weights: Mapping[str, Tensor], device: object) -> Brought | None:
        """Puts it there, for :func:`release`; ``None``, and nothing done, if something has changed."""
        tensors = module._parameters
        if tensors is not self._parameters or device is not self._device or len(tensors) != len(self._away):
            return None
        for now, before in zip(tensors.values(), self._away, strict=True):
            if now is not before:
                return None
        for (_, _, name), away, source, there in self._values:
            if weights[name] is not source or away.requires_grad != there.requires_grad:
                return None
        for (_, label, _), _, _, there in self._values:
            tensors[label] = there  # type: ignore[assignment]
        return self._brought


def slots_of(module: nn.Module, buffers: bool, recurse: bool) -> Iterator[Slot]:
    """The slots of all parameters.

    Args:
        buffers: and of the buffers in the state dict.
        recurse: those of submodules too.
    """
    for prefix, owner in walk(module) if recurse else (("", module),):
        for label, parameter in owner._parameters.items():
            if parameter is not None:
                yield Slot(owner._parameters, label, prefix + label)
        if buffers:
            for label, buffer in owner._buffers.items():
                if buffer is not None and label not in owner._non_persistent_buffers_set:
                    yield Slot(owner._buffers, label, prefix + label)


def bring(
    slots: Iterator[Slot],
    weights: Mapping[str, Tensor],
    device: torch.device | str | int | None,
    tied: TiedTensors | None = None,
    copies: Mapping[str, Tensor] | None = None,
) -> Brought:
    """Puts tensors of ``weights`` on ``device`` and into the ``slots`` that have none; all of them, or none.

    Args:
        tied: copies of shared tensors by address; one that is there is used, and new ones are added for the time.
        copies: what has been made of ``weights`` on ``device`` already, by name.

    Raises:
        InvalidArgument: ``weights`` lacks a tensor, or has one of another shape.
    """
    brought = Brought()
    try:
        for slot in slots:
            old = slot.tensors[slot.label]
            if old is not None and is_meta(old):
                slot.tensors[slot.label] = _brought(slot, old, weights, device, tied, brought, copies or {})
                brought.slots.append((slot, old))
    except BaseException:
        release(brought, tied)
        raise
    return brought


def release(brought: Brought, tied: TiedTensors | None = None) -> None:
    """Takes away again what :func:`bring` has brought."""
    for slot, old in brought.slots:
        slot.tensors[slot.label] = old
    for address, device in brought.copies:
        if tied is not None and address in tied:
            tied[address].pop(device, None)


def _brought(
    slot: Slot,
    old: Tensor,
    weights: Mapping[str, Tensor],
    device: torch.device | str | int | None,
    tied: TiedTensors | None,
    brought: Brought,
    copies: Mapping[str, Tensor],
) -> Tensor:
    try:
        value = weights[slot.name]
    except KeyError as error:
        raise InvalidArgument(
            f"{slot.name!r} is offloaded, but there are no weights of that name ({error}); what is offloaded must be "
            "in the state dict, the folder or the index that was given"
        ) from error
    if value.shape != old.shape:
        raise InvalidArgument(
            f"{slot.name!r} has the shape {tuple(old.shape)}; the offloaded weights have {tuple(value.shape)}"
        )
    address = value.data_ptr() if tied and not is_meta(value) else 0
    shared = tied.get(address) if tied and address else None
    target = torch.device("cpu" if device is None else device)
    copy = None if shared is None else shared.get(target)
    if copy is not None:
        return copy
    made = copies.get(slot.name)
    if made is None or made.dtype != old.dtype or not _is_on(made, target):
        made = value.to(device=device, dtype=old.dtype)
    copy = _fitted(old, value, made)
    if shared is not None:
        shared[target] = copy
        brought.copies.append((address, target))
    return copy


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    any_index: bool = device.index is None  # torch.device("cuda") is any of them
    return tensor.device == device or (any_index and tensor.device.type == device.type)


def _fitted(old: Tensor, value: Tensor, moved: Tensor) -> Tensor:
    """``moved`` as what ``old`` is; a parameter that was neither moved nor converted is itself."""
    if not isinstance(old, nn.Parameter):
        return moved.detach()
    if moved is value and type(value) is type(old) and value.requires_grad == old.requires_grad:
        return value
    return placed_parameter(old, moved)
