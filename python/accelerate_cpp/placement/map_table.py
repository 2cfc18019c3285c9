"""A device map in figures: what is on each device, how large it is, and what is tied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from accelerate_cpp.placement.device_memory import named_devices
from accelerate_cpp.placement.first_fit import OFFLOADED, device_of, is_inside, prefixes
from accelerate_cpp.placement.memory_report import size as shown_size
from accelerate_cpp.placement.module_sizes import Measure, Size
from accelerate_cpp.placement.module_tensors import walk
from accelerate_cpp.placement.tied_parameters import find_tied_parameters
from accelerate_cpp.placement.workload import Needs

__all__ = ["Block", "MapTable", "Row", "shortened", "tabulate"]

Device = int | str | torch.device

_MOST_NAMES = 6
_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass
class Block:
    """A module, or a tensor beside modules, as the picture shows it: its bytes on one device."""

    name: str
    kind: str
    size: Size


@dataclass
class Row:
    """What is on one device; ``room`` is its entry in ``max_memory``, and ``held`` what a workload needs."""

    device: str
    parts: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    weights: Size = 0
    held: Size = 0
    room: Size | None = None

    def share(self) -> str:
        """How much of its room is used, in percent."""
        return f"{100 * (self.weights + self.held) / self.room:.1f} %" if self.room else "-"


@dataclass
class MapTable:
    """A device map in figures; ``ties`` are lines, one for each tensor that has several names."""

    title: str
    rows: list[Row]
    ties: list[str]

    def text(self) -> str:
        """The table."""
        head = ["device", "parts", "weights"]
        cells = [
            [row.device, ", ".join(shortened(row.parts)) or "nothing", shown_size(int(row.weights))]
            for row in self.rows
        ]
        if any(row.held for row in self.rows):
            head.append("workload")
            cells = [[*line, shown_size(int(row.held))] for line, row in zip(cells, self.rows, strict=True)]
        if any(row.room is not None for row in self.rows):
            head.append("of max_memory")
            cells = [[*line, row.share()] for line, row in zip(cells, self.rows, strict=True)]
        return "\n".join([self.title, "", *_aligned([head, *cells]), *(["", *self.ties] if self.ties else [])])


def tabulate(
    model: nn.Module,
    device_map: Mapping[str, Device],
    memory: Mapping[int | str, Size],
    measure: Measure,
    needs: Needs,
) -> MapTable:
    """The figures of ``device_map``.

    Args:
        memory: room of devices, of which all get a row.
        measure: gives the bytes of a tensor.
        needs: bytes in addition to the weights; those of offloaded modules are on the main device, where these run.
    """
    rows = {_key(device): Row(str(device)) for device in device_map.values()}
    for key, room in memory.items():
        rows.setdefault(key, Row(str(key))).room = room
    for name, device in device_map.items():
        rows[_key(device)].parts.append(name or "the whole model")
    total = _count_weights(model, device_map, measure, rows)
    main = next((key for key in rows if key not in OFFLOADED and rows[key].parts), "cpu")
    for name, size in needs.of_modules.items():
        key = _key(_device_of_module(device_map, name))
        rows[main if key in OFFLOADED and main in rows else key].held += size
    for key, row in rows.items():
        row.held += 0 if key in OFFLOADED else needs.everywhere
    used = sum(1 for row in rows.values() if row.parts)
    title = f"{type(model).__name__}: {shown_size(int(total))} on {used} device{'' if used == 1 else 's'}"
    return MapTable(title, [rows[key] for key in sorted(rows, key=_order)], _ties(model, device_map))


def _count_weights(
    model: nn.Module, device_map: Mapping[str, Device], measure: Measure, rows: dict[int | str, Row]
) -> Size:
    """Adds the tensors that have a device to its row, and returns the bytes of all."""
    kinds = dict(_blocks("", model))
    seen: set[tuple[int, int | str]] = set()
    for prefix, module in walk(model):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            device = device_of(device_map, prefix + name)
            if tensor is None or device is None or (id(tensor), _key(device)) in seen:
                continue
            seen.add((id(tensor), _key(device)))
            row, size = rows[_key(device)], measure(tensor, prefix, name)
            row.weights += size
            owner = next((block for block in prefixes(prefix[:-1]) if block in kinds), prefix + name)
            if not row.blocks or row.blocks[-1].name != owner:
                row.blocks.append(Block(owner, kinds.get(owner, "tensor"), 0))
            row.blocks[-1].size += size
    return sum(row.weights for row in rows.values())


def _blocks(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names and classes of the modules that a picture shows as one: those in lists, and those beside what has lists."""
    is_list = isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    if name and not is_list and not any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
        yield name, type(module).__name__
        return
    for label, child in module.named_children():
        inner = f"{name}.{label}" if name else label
        if is_list:
            yield inner, type(child).__name__
        else:
            yield from _blocks(inner, child)


def _device_of_module(device_map: Mapping[str, Device], name: str) -> Device:
    """The device of a module, or if it is split that of the first of its parts."""
    found = device_of(device_map, name)
    if found is None:
        found = next(device_map[part] for part in device_map if is_inside(part, name))
    return found


def _key(device: Device) -> int | str:
    """The key of the device in ``max_memory``: the number of an accelerator, or a name."""
    if isinstance(device, int):
        return device
    kind, _, number = str(device).partition(":")
    return kind if kind in _named() else int(number or 0)


def _order(key: int | str) -> tuple[int, int]:
    return (0, key) if isinstance(key, int) else (1, _named().index(key))


def _named() -> list[str]:
    return [*named_devices(), "meta"]


def _ties(model: nn.Module, device_map: Mapping[str, Device]) -> list[str]:
    lines = []
    for group in find_tied_parameters(model):
        places = [str(device_of(device_map, name)) for name in group]
        if len(set(places)) == 1:
            lines.append(f"tied on {places[0]}: {' = '.join(group)}")
        else:
            names = (f"{name} ({place})" for name, place in zip(group, places, strict=True))
            lines.append(f"tied, with a copy on each device: {' = '.join(names)}")
    return lines


def shortened(names: Iterable[str]) -> list[str]:
    """``names`` with ``a.0-2`` for ``a.0``, ``a.1``, ``a.2``; not all of them if there are many."""
    runs: list[tuple[str, int | None, int]] = []
    for name in names:
        found = _NUMBERED.fullmatch(name)
        stem, number = (found[1], int(found[2])) if found else (name, None)
        last = runs[-1] if runs else None
        if number is not None and last is not None and last[1] is not None and (stem, number) == (last[0], last[2] + 1):
            runs[-1] = stem, last[1], number
        else:
            runs.append((stem, number, number or 0))
    texts = [
        stem if first is None else f"{stem}{first}" if first == last else f"{stem}{first}-{last}"
        for stem, first, last in runs
    ]
    return [*texts[:_MOST_NAMES], f"{len(texts) - _MOST_NAMES} more"] if len(texts) > _MOST_NAMES else texts


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines with columns; names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = (
            cell.ljust(width) if number < 2 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    return lines
