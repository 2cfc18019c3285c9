"""What ``estimate-memory`` shows: tables, bars in text, and bars in a picture."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate_cpp.config.file import in_one_step
from accelerate_cpp.errors import InvalidArgument, MissingLibrary

_BAR_WIDTH = 60
_MARKS = "█▓▒░"
_PLAIN_MARKS = "#=-."


@dataclass(frozen=True)
class Report:
    """Figures in bytes.

    Attributes:
        stored: for each dtype the largest layer and all of the model.
        training: for each precision the bytes of each part, by its name; ``None`` where they are not known.
        failure: why some are not known.
    """

    name: str
    title: str
    parameters: int
    setting: str
    stored: Mapping[str, tuple[int, int]]
    training: Mapping[str, Mapping[str, int | None]]
    failure: str | None = None


def size(count: float) -> str:
    """``count`` bytes with a unit (of 1024)."""
    amount, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    for unit in units:
        if amount < 1024:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.2f} {unit}"
        amount /= 1024
    return f"{amount:.2f} TiB"


def text(report: Report) -> str:
    """The whole report."""
    lines = [f"{report.name}: {report.title}, {report.parameters:,} parameters", ""]
    rows = [(dtype, size(layer), size(total)) for dtype, (layer, total) in report.stored.items()]
    lines += table(("dtype", "largest layer", "total size"), rows)
    if report.training:
        lines += ["", f"Training with {report.setting}:", *_training_table(report)]
        lines += ["", *_bars(report.training), ""]
        if "float16" in report.training:
            lines.append("float16 is mixed precision: weights stay in float32, their copies are among the activations.")
        lines.append("Together is an upper bound of these parts; what kernels need for a moment comes on top.")
    if report.failure:
        lines += [f"Activations are not known: a forward pass without data fails ({report.failure})."]
    return "\n".join(lines)


def _training_table(report: Report) -> list[str]:
    names = list(next(iter(report.training.values())))
    rows = []
    for dtype, parts in report.training.items():
        known = [part for part in parts.values() if part is not None]
        together = size(sum(known)) if len(known) == len(parts) else f"over {size(sum(known))}"
        rows.append((dtype, *("?" if part is None else size(part) for part in parts.values()), together))
    return table(("dtype", *names, "together"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines with columns of equal width, of which the first ``left`` are aligned to the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width) for column, (cell, width) in enumerate(cells)
        )
        for cells in (list(zip(row, widths, strict=True)) for row in (head, *rows))
    ]


def _bars(training: Mapping[str, Mapping[str, int | None]]) -> list[str]:
    marks = _marks()
    longest = max(sum(part or 0 for part in parts.values()) for parts in training.values())
    names = list(next(iter(training.values())))
    lines = []
    for dtype, parts in training.items():
        ends, reached = [0], 0
        for part in parts.values():
            reached += part or 0
            ends.append(round(_BAR_WIDTH * reached / max(longest, 1)))
        bar = "".join(mark * (end - start) for mark, start, end in zip(marks, ends, ends[1:], strict=False))
        lines.append(f"{dtype:8}{bar} {size(reached)}")
    return [*lines, " " * 8 + "  ".join(f"{mark} {name}" for mark, name in zip(marks, names, strict=False))]


def _marks() -> str:
    try:
        _MARKS.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return _PLAIN_MARKS
    return _MARKS


def checked_picture(path: Path) -> Path:
    """``path``, if a picture can be drawn into it; looked at first, as the figures take time.

    Raises:
        MissingLibrary: there is no matplotlib.
        InvalidArgument: matplotlib has no such format, or there is no such folder.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingLibrary(
            "--picture: this needs the Python package matplotlib, which is not installed; install it "
            "(pip install matplotlib), or leave --picture out: the same bars are printed as text"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().lstrip(".") not in known:
        raise InvalidArgument(f"--picture {path}: expected a name that ends in one of .{', .'.join(sorted(known))}")
    if not path.parent.is_dir():
        raise InvalidArgument(f"--picture {path}: there is no folder {path.parent}")
    return path


def draw(report: Report, path: Path) -> None:
    """Draws the sizes for storing and the parts of training as bars, in GiB."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 * (len(report.stored) + len(report.training)) + 2.5), layout="constrained")
    panels = figure.subplots(2 if report.training else 1, squeeze=False).flat
    stored, gib = panels[0], 2**30
    stored.barh(list(report.stored), [total / gib for _, total in report.stored.values()], color="0.6")
    stored.set_title(f"{report.name}: stored in each dtype")
    if report.training:
        rows = list(report.training)
        starts = [0.0] * len(rows)
        for name in next(iter(report.training.values())):
            widths = [(report.training[row][name] or 0) / gib for row in rows]
            panels[1].barh(rows, widths, left=starts, label=name)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        panels[1].set_title(f"training with {report.setting}")
        panels[1].legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    for panel in figure.axes:
        panel.invert_yaxis()
        panel.set_xlabel("GiB")
    try:
        with in_one_step(path) as waiting:
            figure.savefig(waiting, format=path.suffix.lower().lstrip("."))
    except OSError as error:
        raise InvalidArgument(f"--picture {path}: cannot be written ({error})") from error
