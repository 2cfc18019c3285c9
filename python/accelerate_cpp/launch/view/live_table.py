"""The progress of the workers, as a table for a terminal or a cell, and as a line for a log."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from accelerate_cpp.launch.view.slowest_rank import knows_waits, stragglers
from accelerate_cpp.runtime.progress_board import Standing

_UNKNOWN = "-"
_STALL_SECONDS = 10.0
_STALL_STEPS = 5
_LEAST_ROWS = 2
_MOST_ROWS_OF_A_CELL = 64


def table_lines(
    standings: Sequence[Standing], now_ns: int, width: int, height: int, is_last: bool = False
) -> list[str]:
    """At most ``height`` lines of at most ``width`` characters: a head, a row for each rank, and what stands out.

    Where there is no room for all ranks, those that are pointed out come first.

    Args:
        is_last: the run has ended, so nothing is said of time left or of a stall.
    """
    remarks = _fitting(_remarks(standings, now_ns, is_last), height - 2 - _LEAST_ROWS)
    shown, left_out = _chosen(standings, height - 1 - len(remarks))
    head, rows = _cells(shown, standings)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    aligned = ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in (head, *rows)]
    return [line[:width] for line in [*aligned, *left_out, *remarks]]


def table_html(standings: Sequence[Standing], now_ns: int, is_last: bool = False) -> str:
    """The same for a cell; slow ranks are marked."""
    slow = {straggler.rank for straggler in stragglers(standings)}
    shown, left_out = _chosen(standings, _MOST_ROWS_OF_A_CELL)
    head, rows = _cells(shown, standings)
    parts = ["<table><thead><tr>", *(f"<th>{html.escape(cell)}</th>" for cell in head), "</tr></thead><tbody>"]
    for standing, row in zip(shown, rows, strict=True):
        style = ' style="font-weight: bold; color: #b00020"' if standing.rank in slow else ""
        parts += [f"<tr{style}>", *(f"<td>{html.escape(cell)}</td>" for cell in row), "</tr>"]
    parts.append("</tbody></table>")
    parts += [f"<p>{html.escape(remark)}</p>" for remark in [*left_out, *_remarks(standings, now_ns, is_last)]]
    return "".join(parts)


def table_sentence(standings: Sequence[Standing], now_ns: int, is_last: bool = False) -> str:
    """The same in one line: the slowest, the mean, the most."""
    slowest = min(standings, key=lambda standing: standing.steps)
    rate = min(standing.steps_per_second for standing in standings)
    parts = [f"step {slowest.steps}", f"{_rate(rate)} steps/s"]
    if slowest.batches:
        parts.insert(1, f"batch {_position(slowest)} of this pass")
    losses = [standing.loss for standing in standings if not math.isnan(standing.loss)]
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.4g}")
    parts.append(f"memory up to {_size(max(standing.resident_bytes for standing in standings))}")
    device = max(standing.device_bytes for standing in standings)
    if device:
        parts.append(f"on devices up to {_size(device)}")
    if knows_waits(standings):
        waits = [standing.share_waited for standing in standings]
        parts.append(f"waiting {min(waits):.0%} to {max(waits):.0%}")
    return "; ".join([", ".join(parts), *_remarks(standings, now_ns, is_last)])


def _chosen(standings: Sequence[Standing], most: int) -> tuple[list[Standing], list[str]]:
    """The standings for which there is room in ``most`` lines, and a line that says how many there are besides."""
    if len(standings) <= max(_LEAST_ROWS, most):
        return list(standings), []
    slow = {straggler.rank for straggler in stragglers(standings)}
    shown = sorted(standings, key=lambda standing: standing.rank not in slow)[: max(_LEAST_ROWS, most) - 1]
    return shown, [f"and {len(standings) - len(shown)} more ranks"]


def _fitting(remarks: list[str], most: int) -> list[str]:
    """The first of them, and how many there are besides, in ``most`` lines, and at least one."""
    if len(remarks) <= max(1, most):
        return remarks
    shown = remarks[: max(1, most) - 1]
    return [*shown, f"and {len(remarks) - len(shown)} more remarks" if shown else f"{len(remarks)} remarks"]


def _cells(shown: Sequence[Standing], everyone: Sequence[Standing]) -> tuple[list[str], list[list[str]]]:
    has_devices = any(standing.device_bytes for standing in everyone)
    known = knows_waits(everyone)
    has_length = any(standing.batches for standing in everyone)
    head = ["rank", "step", *(["batch"] if has_length else []), "steps/s", "loss", "memory"]
    head += [*(["device"] if has_devices else []), "waiting"]
    rows = []
    for standing in shown:
        began = bool(standing.step_seconds)
        rows.append(
            [
                str(standing.rank),
                str(standing.steps),
                *([_position(standing) if standing.batches else _UNKNOWN] if has_length else []),
                _rate(standing.steps_per_second) if began else _UNKNOWN,
                _UNKNOWN if math.isnan(standing.loss) else f"{standing.loss:.4g}",
                _size(standing.resident_bytes) if standing.resident_bytes else _UNKNOWN,
                *([_size(standing.device_bytes)] if has_devices else []),
                f"{standing.share_waited:.0%}" if known and began else _UNKNOWN,
            ]
        )
    return head, rows


def _remarks(standings: Sequence[Standing], now_ns: int, is_last: bool) -> list[str]:
    remarks = [text for slow in stragglers(standings) for text in (slow.sentence(), slow.cause) if text]
    if is_last:
        return remarks
    last = max((standing.last_ns for standing in standings), default=0)
    usual = max((max(standing.step_seconds, default=0.0) for standing in standings), default=0.0)
    idle = (now_ns - last) / 1e9
    left = [standing.seconds_left for standing in standings if standing.seconds_left is not None]
    if last and idle > max(_STALL_SECONDS, _STALL_STEPS * usual):
        remarks.append(f"no rank has completed a step for {idle:.0f} s")
    elif left and max(left) > idle:
        remarks.append(f"about {_duration(max(left) - idle)} left of this pass over the data")
    return remarks


def _position(standing: Standing) -> str:
    return f"{standing.batches_read}/{standing.batches}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _rate(steps_per_second: float) -> str:
    return f"{steps_per_second:.3g}" if steps_per_second < 100 else f"{steps_per_second:.0f}"


def _size(size_bytes: int) -> str:
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"
