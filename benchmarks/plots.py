"""Draws what collectives.py --json wrote: python benchmarks/plots.py RESULTS.json PICTURE.png"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

Row = dict[str, Any]
# Of Okabe and Ito's palette, which every reader can tell apart; markers differ, too.
STYLES: dict[str, dict[str, Any]] = {
    "gloo": {"color": "#000000", "marker": "o"},
    "Open MPI": {"color": "#E69F00", "marker": "s"},
    "shm": {"color": "#0072B2", "marker": "D"},
    "shm in arena": {"color": "#009E73", "marker": "^"},
    "memcpy": {"color": "#999999", "marker": "", "linestyle": "--"},
}
OTHERS = ("reduce_scatter", "all_gather", "broadcast")


def plot(document: dict[str, Any], target: Path) -> None:
    """Writes the fractions of the first contestant's time as a PNG file: all_reduce by size, the others as bars."""
    panels: dict[tuple[int, str], list[Row]] = {}
    bars: list[Row] = []
    for row in document["results"]:
        measurement = row["measurement"]
        if measurement["operation"] == "all_reduce":
            panels.setdefault((row["processes"], measurement["dtype"]), []).append(row)
        elif measurement["operation"] in OTHERS:
            bars.append(row)
    count = len(panels) + bool(bars)
    if count == 0:
        raise SystemExit("nothing to draw: neither all_reduce nor one of " + ", ".join(OTHERS) + " was measured")
    columns = min(3, count)
    lines = -(-count // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(4.6 * columns, 3.6 * lines + 0.6), layout="constrained", squeeze=False
    )
    axes = list(grid.flat)
    for axis, ((processes, dtype), rows) in zip(axes, panels.items(), strict=False):
        _draw_sizes(axis, rows, f"all_reduce {dtype}, {processes} processes")
    limits = [axis.get_ylim() for axis in axes[: len(panels)]]
    for axis in axes[: len(panels)]:
        axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    if bars:
        _draw_bars(axes[len(panels)], bars)
    for axis in axes[count:]:
        axis.set_axis_off()
    machine = document["machine"]
    figure.suptitle(f"{machine['processor']}, {machine['cores']} cores; lower is faster", fontsize=10)
    figure.supylabel(f"time as a fraction of that of {document['results'][0]['contestant']}", fontsize=10)
    shown = [pair for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(shown)}  # the lines of the first panel, if there is one
    ordered = [name for name in STYLES if name in handles]
    figure.legend(
        [handles[name] for name in ordered], ordered, loc="outside lower center", ncols=len(ordered), frameon=False
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _draw_sizes(axis: Axes, rows: Sequence[Row], title: str) -> None:
    sizes = sorted({row["measurement"]["size_bytes"] for row in rows})
    for name, style in STYLES.items():
        own = sorted(
            (row for row in rows if row["contestant"] == name), key=lambda row: row["measurement"]["size_bytes"]
        )
        if own:
            at = [row["measurement"]["size_bytes"] for row in own]
            low, high = zip(*(row["quartiles"] for row in own), strict=True)
            axis.plot(at, [row["fraction"] for row in own], label=name, markersize=4, linewidth=1.5, **style)
            axis.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axis.set(xscale="log", yscale="log", xlabel="size of the tensor")
    _finish(axis, title)
    axis.xaxis.set_major_locator(FixedLocator(sizes))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _size(size)))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="x", which="minor", length=0)
    axis.tick_params(axis="x", labelsize=8)


def _draw_bars(axis: Axes, rows: Sequence[Row]) -> None:
    operations = [name for name in OTHERS if any(row["measurement"]["operation"] == name for row in rows)]
    names = [name for name in STYLES if any(row["contestant"] == name for row in rows)]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        own = [row for row in rows if row["contestant"] == name]
        at = [operations.index(row["measurement"]["operation"]) + (place - (len(names) - 1) / 2) * width for row in own]
        heights = [row["fraction"] for row in own]
        axis.bar(at, heights, width * 0.9, color=STYLES[name]["color"], label=name)
        for where, height in zip(at, heights, strict=True):
            axis.annotate(f"{height:.2f}", (where, height), ha="center", va="bottom", fontsize=6.5)
    axis.set_xticks(range(len(operations)), operations)
    size = _size(rows[0]["measurement"]["size_bytes"])
    _finish(axis, f"{size}, {rows[0]['measurement']['dtype']}, {rows[0]['processes']} processes")


def _finish(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.spines[["top", "right"]].set_visible(False)


def _size(size_bytes: float) -> str:
    return f"{size_bytes / (1 << 20):.0f} MB" if size_bytes >= 1 << 20 else f"{size_bytes / (1 << 10):.0f} KB"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
