"""Finds a place on the accelerators for a whole model: in its order and evenly, else in any way that fits.

First fit keeps room for layers that are offloaded, and fills devices one after the other; so it may offload although
everything fits, and it fills the last device least. The search is in C++ (csrc/core/placement/partition.h).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from accelerate_cpp._native import any_fit, balanced_partition
from accelerate_cpp.placement.first_fit import OFFLOADED, Device, Part, Placement, Room, Size, prefixes

_TOLERANCE = 0.05
"""How far the largest load may be above what no partition can be below, if fewer modules are split for it."""
_MOST_STEPS = 1_000_000
"""Bounds the search for a fit out of order to about a second."""


def offloads(placement: Placement) -> bool:
    """Whether anything of the model is on the CPU or the disk."""
    return any(device in OFFLOADED for device in placement.devices.values())


def fit_on_accelerators(
    parts: Sequence[Part], rooms: Sequence[Room], ties: Sequence[Sequence[str]] = ()
) -> Placement | None:
    """A placement of all ``parts`` on the accelerators among ``rooms``; ``None`` if there is none, or none was found.

    If that fits, neighbours stay together, and the largest load is as small as it can be; or up to 5 % above the larger
    of the mean load and the largest part that cannot be split, if fewer modules are split then. Else any way to keep
    within the rooms is taken. What a module that is split has beside its parts counts with the first of these.

    Args:
        ties: groups of names of tensors that are one. Parts with the same tensor go to one device.
    """
    accelerators = [room for room in rooms if room.device not in OFFLOADED and room.size]
    if sum(part.size for part in parts) > sum(room.size or 0 for room in accelerators) or not accelerators:
        return None
    depth = _depth(parts)
    in_order = _shared_out(parts, depth, accelerators, ties, _in_order)
    # Out of order, large blocks are tried first: those of small ones would send activations back and forth.
    tries = (_shared_out(parts, level, accelerators, ties, _in_any_order) for level in range(depth + 1))
    found = in_order or next(filter(None, tries), None)
    if found is not None:
        for room in rooms:
            found.used.setdefault(room.device, 0)
            found.buffers.setdefault(room.device, 0)
    return found


Spans = list[tuple[int, int]]
Solver = Callable[[list[int], list[int], Spans], list[int] | None]


def _in_order(sizes: list[int], capacities: list[int], modules: Spans) -> list[int] | None:
    return balanced_partition(block_bytes=sizes, capacities=capacities, modules=modules, tolerance=_TOLERANCE)


def _in_any_order(sizes: list[int], capacities: list[int], modules: Spans) -> list[int] | None:
    return any_fit(block_bytes=sizes, capacities=capacities, most_steps=_MOST_STEPS)


def _shared_out(
    parts: Sequence[Part], depth: int, accelerators: Sequence[Room], ties: Sequence[Sequence[str]], solve: Solver
) -> Placement | None:
    """The result of ``solve`` for the parts, with modules split down to ``depth``."""
    blocks = [pair for part in parts for pair in _blocks(part, depth)]
    names = [block.name for block, _ in blocks]
    groups = _groups(names, ties)
    sizes = [math.ceil(sum(blocks[number][1] for number in group)) for group in groups]
    group_of = {names[number]: place for place, group in enumerate(groups) for number in group}
    modules: Spans = []
    for part in parts:
        _span(part, group_of, modules)
    found = solve(sizes, [max(0, math.floor(room.size or 0)) for room in accelerators], modules)
    if found is None:
        return None
    devices = {name: accelerators[found[group_of[name]]].device for name in names}
    result = Placement({}, {room.device: 0 for room in accelerators}, {room.device: 0 for room in accelerators}, {})
    for part in parts:
        result.devices.update(_entries(part, devices))
    for block, size in blocks:
        result.used[devices[block.name]] += size
        result.buffers[devices[block.name]] += block.buffer_bytes
    return result


def _depth(parts: Iterable[Part]) -> int:
    """How often a part can be split."""
    return max((1 + _depth(part.parts) for part in parts if part.parts), default=0)


def _blocks(part: Part, depth: int, carried: Size = 0) -> Iterator[tuple[Part, Size]]:
    """The parts of ``part`` that are not split further, and their bytes; what is beside them counts with the next."""
    if not part.parts or depth == 0:
        yield part, part.size + carried
        return
    carried += max(0, part.size - sum(inner.size for inner in part.parts))
    for inner in part.parts:
        yield from _blocks(inner, depth - 1, carried)
        carried = 0


def _groups(names: Sequence[str], ties: Sequence[Sequence[str]]) -> list[list[int]]:
    """The numbers of blocks that stay together, in the order of the first of each group."""
    leader = list(range(len(names)))
    number_of = {name: number for number, name in enumerate(names)}

    def lead(number: int) -> int:
        while leader[number] != number:
            number = leader[number]
        return number

    for tensors in ties:
        found = (next((number_of[path] for path in prefixes(name) if path in number_of), None) for name in tensors)
        sharing = sorted({number for number in found if number is not None})
        for number in sharing[1:]:
            first, second = sorted((lead(sharing[0]), lead(number)))
            leader[second] = first
    groups: dict[int, list[int]] = {}
    for number in range(len(names)):
        groups.setdefault(lead(number), []).append(number)
    return list(groups.values())


def _span(part: Part, group_of: Mapping[str, int], modules: Spans) -> tuple[int, int]:
    """The first group of ``part``, and the one after its last; added to ``modules`` if these can be split."""
    if part.name in group_of:
        return group_of[part.name], group_of[part.name] + 1
    inner = [_span(inner, group_of, modules) for inner in part.parts]
    span = min(begin for begin, _ in inner), max(end for _, end in inner)
    if span[1] - span[0] > 1:
        modules.append(span)
    return span


def _entries(part: Part, devices: Mapping[str, Device]) -> dict[str, Device]:
    """The entry of a module that is on one device, else the entries of its parts."""
    if part.name in devices:
        return {part.name: devices[part.name]}
    entries = {name: device for inner in part.parts for name, device in _entries(inner, devices).items()}
    places = set(entries.values())
    return {part.name: places.pop()} if len(places) == 1 else entries
