"""The results of a storm as a table."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.storm.draw import KINDS

_HEAD = (
    "fault",
    "runs",
    "ended",
    "status",
    "nothing left",
    "checkpoint loads",
    "named",
    "within 2 s",
    "median s",
    "worst",
)
Row = dict[str, Any]


def _timed(due: Sequence[Row]) -> tuple[int, int]:
    """In how many runs the cause was named within 2 s of the moment at which somebody could know of it; of how many."""
    timed = [row for row in due if row["seconds_of_silence"] is not None]
    quick = sum(row["named"] and row["seconds_to_name"] - row["seconds_of_silence"] <= 2 for row in timed)
    return quick, len(timed)


def _quick(due: Sequence[Row]) -> str:
    quick, timed = _timed(due)
    return f"{quick} of {timed}"


def are_late(rows: Sequence[Row]) -> bool:
    """Whether more than one in a hundred causes came late."""
    quick, timed = _timed([row for row in rows if row.get("named") is not None])
    return (timed - quick) * 100 > max(timed, 100)


def _share(rows: Sequence[Row], failure: str) -> str:
    """How many of the runs do not fail by this."""
    return str(sum(not any(text.startswith(failure) for text in row["failures"]) for row in rows))


def _cells(name: str, rows: Sequence[Row]) -> list[str]:
    due = [row for row in rows if row["named"] is not None]
    seconds = [row["seconds_to_name"] for row in due if row["seconds_to_name"] is not None]
    return [
        name,
        str(len(rows)),
        *(_share(rows, failure) for failure in ("hung", "status", "left", "checkpoint")),
        f"{sum(row['named'] for row in due)} of {len(due)}",
        _quick(due),
        f"{median(seconds):.2f}" if seconds else "",
        f"{max(seconds):.2f}" if seconds else "",
    ]


def table(rows: Sequence[Row]) -> str:
    """One line for each kind of fault, in Markdown."""
    done = [row for row in rows if "skipped" not in row]
    lines = [list(_HEAD), ["---"] * len(_HEAD)]
    for kind in KINDS:
        if of_kind := [row for row in done if row["fault"]["kind"] == kind]:
            lines.append(_cells(kind, of_kind))
    lines.append(_cells("all", done))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(rows: Sequence[Row]) -> str:
    """A sentence about all of them."""
    done = [row for row in rows if "skipped" not in row]
    held = sum(not row["failures"] for row in done)
    due = [row for row in done if row["named"] is not None]
    named = sum(row["named"] for row in due)
    skipped = f", {len(rows) - len(done)} skipped" if len(rows) > len(done) else ""
    missed = sum(bool(row.get("missed")) for row in done)
    return (
        f"{held} of {len(done)} as promised, {_share(done, 'hung')} ended, "
        f"{named} of {len(due)} named, {_quick(due)} within 2 s{skipped}{f', {missed} came too late' if missed else ''}"
    )
