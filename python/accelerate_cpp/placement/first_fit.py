"""Which part of a model goes to which device: first fit, in the order of the model. Knows names and sizes only.

This is the decision alone, without torch: parts in, devices out. It takes time in proportion to the number of parts,
times the depth of the model. A device that is "reserving" keeps room for the largest layer that has no place yet, since
what is offloaded is brought to it layer by layer. Shared tensors ("ties") stay together as far as there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

Device = int | str
Size = float
AnyDevice = TypeVar("AnyDevice")

OFFLOADED = ("cpu", "disk")
"""Where parts are that no accelerator has room for."""


@dataclass(slots=True)
class Part:
    """A tensor or a module of a model.

    Attributes:
        name: dotted.
        size: in bytes, of everything in it; shared tensors count in the first part that has them.
        parts: what it is made of and can be split into; none for tensors, for modules without modules in them, and for
            modules that must stay whole.
        is_module: whether it is not a tensor.
        buffer_bytes: of the buffers in it, if it is a module.
        held_bytes: of its size, what is not a tensor of the model: activations and caches.
    """

    name: str
    size: Size
    parts: list[Part] = field(default_factory=list)
    is_module: bool = True
    buffer_bytes: Size = 0
    held_bytes: Size = 0


@dataclass(frozen=True)
class Room:
    """A device: how many bytes it has, ``None`` for any number, and whether it keeps room for the largest layer."""

    device: Device
    size: Size | None
    reserving: bool = False


@dataclass
class Placement:
    """A decision.

    Attributes:
        devices: of parts, by name; no part of a part that is there is there, too.
        used: bytes by device, with what is reserved on devices that are full.
        buffers: bytes of buffers by device.
        needed: of devices that got nothing, the bytes that the first part they were offered would have taken.
    """

    devices: dict[str, Device]
    used: dict[Device, Size]
    buffers: dict[Device, Size]
    needed: dict[Device, Size]


def place(
    parts: Sequence[Part],
    rooms: Sequence[Room],
    ties: Sequence[Sequence[str]] = (),
    sizes: Mapping[str, Size] | None = None,
    fallback: bool = False,
    tell: Callable[[str], None] | None = None,
) -> Placement:
    """Assigns a device to each of ``parts``, or to everything that it is made of.

    Args:
        rooms: in the order of preference; the last one must have any number of bytes.
        ties: groups of names of tensors that are one.
        sizes: bytes of tensors by name, for those in ``ties``; 0 if missing.
        fallback: when not even the first part that is offered to a device fits, look for a later one that does.
        tell: is told of each decision.
    """
    solver = _Solver(parts, rooms, ties, sizes or {}, fallback, tell)
    return solver.solve()


def device_of(devices: Mapping[str, AnyDevice], name: str) -> AnyDevice | None:
    """The device of a part in a device map: its own entry, or that of the smallest part around it.

    ``None`` if it gives none. The key ``""`` is around all parts.
    """
    for path in prefixes(name):
        if path in devices:
            return devices[path]
    return devices.get("")


def is_in_one_of(name: str, modules: Iterable[str]) -> bool:
    """Whether ``name`` is one of ``modules`` or inside one; these may lack the beginnings of their names."""
    return any(f".{module}." in f".{name}." for module in modules)


def is_inside(name: str, part: str) -> bool:
    """Whether ``name`` is the part ``part`` of a model, or in it."""
    return name == part or name.startswith(f"{part}.")


class _Layers:
    """The layers that have no place yet, and the size of the largest.

    That size is computed again when all layers that had it are gone, or when a part is split. Layers that found a place
    together with another part, out of order, count on until then, as in the original.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._ids: dict[str, range] = {}
        self._sizes: list[Size] = []
        self._waiting: dict[Size, set[int]] = {}
        for part in parts:
            self._number(part)
        self._find_largest()  # over tensors, too, which are not looked at any more later
        self._waiting = {}
        for part in parts:
            self.put_back(part)

    def _number(self, part: Part) -> None:
        first = len(self._sizes)
        if part.parts:
            for inner in part.parts:
                if inner.is_module:
                    self._number(inner)
        else:
            self._sizes.append(part.size)
            self._waiting.setdefault(part.size, set()).add(first)
        self._ids[part.name] = range(first, len(self._sizes))

    def _find_largest(self) -> None:
        self.largest = max((size for size, layers in self._waiting.items() if layers), default=0)
        self._largest_layers = set(self._waiting.get(self.largest, ()))

    def take(self, part: Part) -> None:
        """``part`` is being placed: the largest layer is looked for among the others."""
        self.remove(part)
        self._largest_layers.difference_update(self._ids.get(part.name, ()))
        if not self._largest_layers:
            self._find_largest()

    def remove(self, part: Part) -> None:
        """The layers of ``part`` are no longer waiting."""
        for layer in self._ids.get(part.name, ()):
            self._waiting.get(self._sizes[layer], set()).discard(layer)

    def put_back(self, part: Part) -> None:
        """The layers of ``part`` wait again."""
        for layer in self._ids[part.name] if part.is_module else ():
            self._waiting.setdefault(self._sizes[layer], set()).add(layer)

    def split(self) -> None:
        """A part was split."""
        self._find_largest()


class _Solver:
    """The state of one run of :func:`place`."""

    def __init__(
        self,
        parts: Sequence[Part],
        rooms: Sequence[Room],
        ties: Sequence[Sequence[str]],
        sizes: Mapping[str, Size],
        fallback: bool,
        tell: Callable[[str], None] | None,
    ) -> None:
        self._rooms, self._sizes, self._fallback, self._tell = rooms, sizes, fallback, tell
        self._layers = _Layers(parts)
        self._stack = list(reversed(parts))
        self._split: set[str] = set()
        self._tops = {part.name: part for part in parts}
        self._groups = [list(group) for group in ties]
        self._groups_of = self._index_groups()
        self._at = 0
        self._used: dict[Device, Size] = {room.device: 0 for room in rooms}
        self._result = Placement({}, self._used, {room.device: 0 for room in rooms}, {})

    def _index_groups(self) -> dict[str, list[int]]:
        """The groups of tied tensors that have one in a part, by the name of the part."""
        groups_of: dict[str, list[int]] = {}
        for number, group in enumerate(self._groups):
            for name in group:
                for path in prefixes(name):
                    entry = groups_of.setdefault(path, [])
                    if not entry or entry[-1] != number:
                        entry.append(number)
        return groups_of

    def solve(self) -> Placement:
        while self._stack:
            part = self._stack.pop()
            if part.name in self._result.devices:
                continue
            if part.name in self._split:
                self._stack.extend(reversed(part.parts))
            else:
                self._consider(part)
        return self._result

    def _consider(self, part: Part) -> None:
        """Tries one part on the current device: it is put there, or something is split, or the next device is tried."""
        self._layers.take(part)
        room = self._rooms[self._at]
        reserve = self._layers.largest if room.reserving else 0
        tied, size = self._with_ties(part, self._split)
        free = None if room.size is None else room.size - reserve - self._used[room.device]
        if free is None or size <= free:
            self._put([part, *tied], room.device, size)
            return
        self._layers.put_back(part)
        self._stack.append(part)
        if part.size <= free and self._split_one_of(tied):
            return
        if part.size >= free and part.parts:
            self._split_part(part)
            return
        if self._fallback and not self._used[room.device] and self._take_another(room, max(reserve, size)):
            return
        self._next_device(part, room, size, reserve)

    def _with_ties(self, part: Part, split: Collection[str]) -> tuple[list[Part], Size]:
        """The waiting parts that share tensors with ``part``, one for each shared tensor, and the bytes of all of them.

        Args:
            split: names of parts that count as their parts.
        """
        tied, size = [], part.size
        for number in self._groups_of.get(part.name, ()):
            for name in self._groups[number]:
                other = None if is_inside(name, part.name) else self._waiting_part(name, split)
                if other is not None:
                    tied.append(other)
                    size += other.size - self._sizes.get(name, 0)
        return tied, size

    def _waiting_part(self, tensor: str, split: Collection[str]) -> Part | None:
        """The part with ``tensor`` that has neither been placed nor split."""
        found = next((self._tops[path] for path in prefixes(tensor) if path in self._tops), None)
        while found is not None and found.name in split:
            found = next((inner for inner in found.parts if is_inside(tensor, inner.name)), None)
        return None if found is None or found.name in self._result.devices else found

    def _put(self, parts: Sequence[Part], device: Device, size: Size) -> None:
        if self._tell is not None:
            self._tell(f"{' and '.join(dict.fromkeys(part.name for part in parts))}: {size} bytes, to {device}")
        self._used[device] += size
        for part in parts:
            if part.name not in self._result.devices:
                self._result.devices[part.name] = device
                self._result.buffers[device] += part.buffer_bytes
                self._layers.remove(part)

    def _split_one_of(self, parts: Sequence[Part]) -> bool:
        for part in parts:
            if part.parts:
                self._split_part(part)
                return True
        return False

    def _split_part(self, part: Part) -> None:
        if self._tell is not None:
            self._tell(f"{part.name}: {part.size} bytes, is split")
        self._split.add(part.name)
        self._layers.split()

    def _take_another(self, room: Room, reserve: Size) -> bool:
        """Moves the first waiting part that fits to the front; whether there is one."""
        assert room.size is not None
        path = self._first_that_fits(room.size - reserve)
        if not path:
            return False
        self._split.update(part.name for part in path[:-1])
        self._stack.append(path[-1])
        return True

    def _first_that_fits(self, size: Size) -> list[Part]:
        """The first part that fits, in the order of the model, after the parts it is in; nothing if none fits."""
        ahead = [[part] for part in self._stack]
        split = set(self._split)
        while ahead:
            path = ahead.pop()
            part = path[-1]
            if part.name in self._result.devices:
                continue
            if part.name not in split:
                if self._with_ties(part, split)[1] <= size:
                    return path
                if part.parts:
                    split.add(part.name)
            ahead.extend([*path, inner] for inner in reversed(part.parts))
        return []

    def _next_device(self, part: Part, room: Room, size: Size, reserve: Size) -> None:
        if not self._used[room.device]:
            self._result.needed[room.device] = size + reserve
        self._used[room.device] += reserve
        self._at += 1
        if self._tell is not None:
            self._tell(f"{part.name}: {size} bytes, does not fit on {room.device}, which keeps {reserve} for a layer")


def prefixes(name: str) -> Iterator[str]:
    """``"a.b.c"``, ``"a.b"`` and ``"a"`` for ``"a.b.c"``: a part of a model, and what it is in, the smallest first."""
    while name:
        yield name
        name = name.rpartition(".")[0]
