"""A device map to look at: a table in text, and a picture with a bar for each device."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from accelerate_cpp.config.file import in_one_step
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.placement.device_map import Device, check_device_map
from accelerate_cpp.placement.device_memory import get_max_memory
from accelerate_cpp.placement.map_table import Block, MapTable, Row, shortened, tabulate
from accelerate_cpp.placement.memory_report import size as shown_size
from accelerate_cpp.placement.module_sizes import Dtype, Measure
from accelerate_cpp.placement.workload import Workload, needs_of

__all__ = ["checked_png", "device_map_table", "draw"]

WIDTH, DOTS_PER_INCH = 11, 110
"""Inches, and pixels of each."""

_COLOURS = ("#3b6ea5", "#c05c12", "#3f8f46", "#8f5fa8", "#2f8f8a", "#b83a3a", "#7a5a44", "#8a7a10")
_HELD = "0.75"
_HELD_HATCH, _SPLIT_HATCH = "///", "xxx"
_NARROWEST_LABEL = 0.0085
"""Part of the picture's width that a character takes."""
_SMALLEST_VISIBLE = 0.002


def device_map_table(
    model: nn.Module,
    device_map: Mapping[str, Device],
    max_memory: Mapping[int | str, int | str] | None = None,
    *,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    workload: Workload | None = None,
    png: str | Path | None = None,
) -> str:
    """What ``device_map`` puts where, as a table: device, parts, bytes, share of ``max_memory``, and what is tied.

    Tensors that are one count once on each device.

    Args:
        model: may be on the meta device.
        max_memory: room of devices, as :func:`get_max_memory` takes it; without it there is no share.
        dtype: what the weights will be converted to.
        special_dtypes: other dtypes for some of them, by name.
        workload: what the map leaves room for in addition to the weights; it gets a column.
        png: also draw it into this file.

    Raises:
        InvalidArgument: the map leaves out a tensor; ``png`` cannot be written.
        MissingLibrary: ``png`` is given, and there is no matplotlib.
    """
    path = None if png is None else checked_png(Path(png))
    check_device_map(model, device_map)
    memory = {} if max_memory is None else get_max_memory(max_memory)
    table = tabulate(model, device_map, memory, Measure(dtype, special_dtypes), needs_of(model, workload, dtype))
    if path is not None:
        draw(table, path)
    return table.text()


def checked_png(path: Path) -> Path:
    """``path``, if a picture can be drawn into it.

    Raises:
        MissingLibrary: there is no matplotlib.
        InvalidArgument: there is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingLibrary(
            f"device_map_table: png={str(path)!r} needs the Python package matplotlib, which is not installed; install "
            "it (pip install matplotlib), or leave png out: the table says the same"
        )
    if not path.parent.is_dir():
        raise InvalidArgument(f"device_map_table: png={str(path)!r}: there is no folder {path.parent}")
    return path


def draw(table: MapTable, path: Path) -> None:
    """Draws ``table`` into the file ``path``, as PNG.

    Raises:
        InvalidArgument: it cannot be written.
    """
    from matplotlib.figure import Figure

    rows = table.rows
    height = 0.62 * len(rows) + 1.6 + 0.2 * len(table.ties)
    figure = Figure(figsize=(WIDTH, height), dpi=DOTS_PER_INCH, layout="constrained")
    panel, axis = figure.subplots(), _axis(rows)
    for place, row in enumerate(rows):
        _draw_row(panel, place, row, axis)
    panel.set_xlim(0, axis.edge)
    panel.set_ylim(len(rows) - 0.45, -0.55)
    panel.set_yticks(range(len(rows)), [f"{row.device}\n{shown_size(int(row.weights + row.held))}" for row in rows])
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.set_xlabel("\n".join([axis.unit, *table.ties]))
    panel.set_title(table.title, loc="left", fontweight="bold")
    _draw_legend(figure, rows, axis)
    try:
        with in_one_step(path) as waiting:
            figure.savefig(waiting, format="png")
    except OSError as error:
        raise InvalidArgument(f"device_map_table: png={str(path)!r} cannot be written ({error})") from error


@dataclass(frozen=True)
class _Axis:
    """What rows are drawn with: bytes of a unit, its name, units up to which the picture goes, colours of classes, and
    the names of the blocks that are on several devices."""

    scale: int
    unit: str
    edge: float
    colours: dict[str, str]
    split: set[str]


def _axis(rows: list[Row]) -> _Axis:
    longest = max((row.weights + row.held for row in rows), default=0) or 1
    # Rooms that are much larger, such as that of the CPU, continue beyond the picture.
    rooms = (row.room for row in rows if row.room is not None and row.room < 3 * longest)
    edge = max(1.3 * longest, 1.05 * max(rooms, default=0))
    units = ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
    scale, unit = next((pair for pair in units if edge >= pair[0]), (1, "bytes"))
    kinds = dict.fromkeys(block.kind for row in rows for block in row.blocks)
    places = Counter(name for row in rows for name in {block.name for block in row.blocks})
    split = {name for name, count in places.items() if count > 1}
    return _Axis(scale, unit, edge / scale, dict(zip(kinds, itertools.cycle(_COLOURS), strict=False)), split)


def _draw_row(panel: Any, place: int, row: Row, axis: _Axis) -> None:
    """Draws the room of a device as a frame, filled from the left."""
    if row.room is not None:
        panel.barh(place, min(row.room / axis.scale, 2 * axis.edge), 0.72, color="0.96", edgecolor="0.6", linewidth=0.8)
    reached = 0.0
    for run in _runs(row.blocks):
        start, colour = reached, axis.colours[run[0].kind]
        for block in run:
            width, hatch = block.size / axis.scale, _SPLIT_HATCH if block.name in axis.split else None
            panel.barh(place, width, 0.6, left=reached, color=colour, edgecolor="white", hatch=hatch, linewidth=0.5)
            reached += width
        text = ", ".join(shortened(".".join(block.name.split(".")[-2:]) for block in run))
        if len(text) * _NARROWEST_LABEL * axis.edge < reached - start:
            background = {"facecolor": colour, "edgecolor": "none", "pad": 1.0}
            panel.text((start + reached) / 2, place, text, va="center", ha="center", size=8, color="w", bbox=background)
    held = row.held / axis.scale
    if held:
        panel.barh(place, held, 0.6, left=reached, color=_HELD, edgecolor="white", hatch=_HELD_HATCH, linewidth=0.5)
    if row.room:
        text = f" {row.share()} of {shown_size(int(row.room))}"
        panel.text(reached + held, place, text, va="center", ha="left", size=9, clip_on=True)


def _runs(blocks: Iterable[Block]) -> list[list[Block]]:
    """Neighbours of the same class together."""
    return [list(run) for _, run in itertools.groupby(blocks, lambda block: block.kind)]


def _draw_legend(figure: Any, rows: list[Row], axis: _Axis) -> None:
    """Names the colours that can be seen."""
    from matplotlib.patches import Patch

    sizes: Counter[str] = Counter()
    for block in (block for row in rows for block in row.blocks):
        sizes[block.kind] += int(block.size)
    patches = [
        Patch(facecolor=colour, label=kind)
        for kind, colour in axis.colours.items()
        if sizes[kind] > _SMALLEST_VISIBLE * axis.edge * axis.scale
    ]
    if axis.split:
        patches.append(Patch(facecolor="white", edgecolor="0.4", hatch=_SPLIT_HATCH, label="split"))
    if any(row.held for row in rows):
        patches.append(Patch(facecolor=_HELD, edgecolor="white", hatch=_HELD_HATCH, label="workload"))
    figure.legend(
        handles=patches, loc="outside upper right", ncols=max(1, min(len(patches), 5)), fontsize=8, frameon=False
    )
