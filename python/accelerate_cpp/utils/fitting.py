"""Finds a place on the accelerators for a whole model where first fit would offload a part of it.

First fit keeps room for layers that are offloaded, and fills devices in order; so it may offload although everything
fits. The search is in C++ (csrc/core/placement/partition.h).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from accelerate_cpp._native import any_fit, balanced_partition
from accelerate_cpp.utils.placement import Device, Part, Placement, Room

_OFFLOADED = ("cpu", "disk")
_MOST_STEPS = 1_000_000
"""Bounds the search for a fit out of order to about a second."""


def offloads(placement: Placement) -> bool:
    """Whether anything of the model is on the CPU or the disk."""
    return any(device in _OFFLOADED for device in placement.devices.values())


def fit_on_accelerators(
    parts: Sequence[Part], rooms: Sequence[Room], ties: Sequence[Sequence[str]] = ()
) -> Placement | None:
    """A placement of all ``parts`` on the accelerators among ``rooms``; ``None`` if there is none, or none was found.

    Neighbours stay together and loads are even, if that fits; else any way to keep within the rooms is taken.

    Args:
        ties: groups of names of tensors that are one. Parts with the same tensor go to one device.
    """
    accelerators = [room for room in rooms if room.device not in _OFFLOADED and room.size is not None]
    atoms = list(_atoms(parts))
    # What is in no atom, such as buffers of modules that are split, follows its module, wherever that is.
    loose = max(0.0, sum(part.size for part in parts) - sum(atom.size for atom in atoms))
    capacities = [max(0, math.floor((room.size or 0) - loose)) for room in accelerators]
    if not capacities:
        return None
    groups = _groups(atoms, ties)
    sizes = [math.ceil(sum(atoms[number].size for number in group)) for group in groups]
    found = balanced_partition(block_bytes=sizes, capacities=capacities)
    if found is None:
        found = any_fit(block_bytes=sizes, capacities=capacities, most_steps=_MOST_STEPS)
    if found is None:
        return None
    chosen: dict[int, Device] = {}
    for group, device in zip(groups, found, strict=True):
        chosen.update(dict.fromkeys(group, accelerators[device].device))
    return _placement(atoms, [chosen[number] for number in range(len(atoms))], rooms)


def _atoms(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        if part.parts:
            yield from _atoms(part.parts)
        else:
            yield part


def _groups(atoms: Sequence[Part], ties: Sequence[Sequence[str]]) -> list[list[int]]:
    """The numbers of atoms that stay together, in the order of the first of each group."""
    leader = list(range(len(atoms)))

    def lead(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for names in ties:
        sharing = [
            number
            for number, atom in enumerate(atoms)
            if any(name == atom.name or name.startswith(f"{atom.name}.") for name in names)
        ]
        for number in sharing[1:]:
            first, second = sorted((lead(sharing[0]), lead(number)))
            leader[second] = first
    groups: dict[int, list[int]] = {}
    for number in range(len(atoms)):
        groups.setdefault(lead(number), []).append(number)
    return list(groups.values())


def _placement(atoms: Sequence[Part], devices: Sequence[Device], rooms: Sequence[Room]) -> Placement:
    used: dict[Device, float] = {room.device: 0 for room in rooms}
    buffers: dict[Device, float] = {room.device: 0 for room in rooms}
    for atom, device in zip(atoms, devices, strict=True):
        used[device] += atom.size
        buffers[device] += atom.buffer_bytes
    return Placement({atom.name: device for atom, device in zip(atoms, devices, strict=True)}, used, buffers, {})
