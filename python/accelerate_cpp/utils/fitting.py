"""Finds a place on the accelerators for a whole model where first fit would offload a part of it.

First fit keeps room for layers that are offloaded, and fills devices in order; so it may offload although everything
fits. The search is in C++ (csrc/core/placement/partition.h).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from accelerate_cpp._native import any_fit, balanced_partition
from accelerate_cpp.utils.placement import Device, Part, Placement, Room, is_inside

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
    if not accelerators:
        return None
    depth = _depth(parts)
    in_order = _shared_out(parts, depth, accelerators, ties, balanced_partition)
    # Out of order, large blocks are tried first: those of small ones would send activations back and forth.
    tries = (_shared_out(parts, level, accelerators, ties, _any_fit) for level in range(depth + 1))
    chosen = in_order or next(filter(None, tries), None)
    return None if chosen is None else _placement(chosen, rooms)


def _any_fit(*, block_bytes: Sequence[int], capacities: Sequence[int]) -> list[int] | None:
    return any_fit(block_bytes=block_bytes, capacities=capacities, most_steps=_MOST_STEPS)


def _shared_out(
    parts: Sequence[Part],
    depth: int,
    accelerators: Sequence[Room],
    ties: Sequence[Sequence[str]],
    solve: Callable[..., list[int] | None],
) -> list[tuple[Part, Device]] | None:
    """What ``solve`` makes of the parts, with modules split down to ``depth``."""
    blocks = list(_blocks(parts, depth))
    # What is in no block, such as buffers of modules that are split, follows its module, wherever that is.
    loose = max(0.0, sum(part.size for part in parts) - sum(block.size for block in blocks))
    groups = _groups(blocks, ties)
    found = solve(
        block_bytes=[math.ceil(sum(blocks[number].size for number in group)) for group in groups],
        capacities=[max(0, math.floor((room.size or 0) - loose)) for room in accelerators],
    )
    if found is None:
        return None
    device_of = {
        number: accelerators[device].device for group, device in zip(groups, found, strict=True) for number in group
    }
    return [(block, device_of[number]) for number, block in enumerate(blocks)]


def _depth(parts: Iterable[Part]) -> int:
    """How often a part can be split."""
    return max((1 + _depth(part.parts) for part in parts if part.parts), default=0)


def _blocks(parts: Iterable[Part], depth: int) -> Iterator[Part]:
    for part in parts:
        if part.parts and depth > 0:
            yield from _blocks(part.parts, depth - 1)
        else:
            yield part


def _groups(blocks: Sequence[Part], ties: Sequence[Sequence[str]]) -> list[list[int]]:
    """The numbers of blocks that stay together, in the order of the first of each group."""
    leader = list(range(len(blocks)))

    def lead(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for names in ties:
        sharing = [number for number, block in enumerate(blocks) if any(is_inside(name, block.name) for name in names)]
        for number in sharing[1:]:
            first, second = sorted((lead(sharing[0]), lead(number)))
            leader[second] = first
    groups: dict[int, list[int]] = {}
    for number in range(len(blocks)):
        groups.setdefault(lead(number), []).append(number)
    return list(groups.values())


def _placement(chosen: Sequence[tuple[Part, Device]], rooms: Sequence[Room]) -> Placement:
    used: dict[Device, float] = {room.device: 0 for room in rooms}
    buffers: dict[Device, float] = {room.device: 0 for room in rooms}
    for block, device in chosen:
        used[device] += block.size
        buffers[device] += block.buffer_bytes
    return Placement({block.name: device for block, device in chosen}, used, buffers, {})
