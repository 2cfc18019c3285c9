"""Whether a measure grows while a program runs: medians of thirds, after a warm-up.

The first quarter of a series is warm-up: allocators, caches and pools fill. Of what follows, the median of the last
third is compared with that of the first; a value that is out of the ordinary now and then changes neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

WARM_UP = 0.25
FEWEST = 12
"""Values that a series needs at least: nine after the warm-up."""
MEMORY_TOLERANCE = 4 << 20
"""How far apart the medians of memory may be, in bytes: how full malloc's heaps are differs so much between moments.
What is counted may not differ at all."""


@dataclass(frozen=True)
class Growth:
    """How much a measure has grown over ``operations`` and ``steps``, and how much it may.

    ``operations`` and ``steps`` are those between the medians.
    """

    measure: str
    grown: float
    tolerance: float
    operations: float
    steps: float

    @property
    def grows(self) -> bool:
        return self.grown > self.tolerance

    @property
    def smallest_seen(self) -> float:
        """The growth per step (of memory) or per operation (of what is counted) above which it would be noticed."""
        return self.tolerance / self.steps if self.tolerance else 1 / self.operations

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "grows": self.grows, "smallest_seen": self.smallest_seen}

    def __str__(self) -> str:
        unit = f"{self.grown / 1024:+.0f} KiB" if self.tolerance else f"{self.grown:+g}"
        return f"{self.measure}: {unit} over {self.operations:.0f} operations, {self.steps:.0f} steps"


def ends(series: Sequence[float]) -> tuple[float, float]:
    """The medians of the first and of the last third of what follows the warm-up."""
    begin = int(len(series) * WARM_UP)
    third = (len(series) - begin) // 3
    return median(series[begin : begin + third]), median(series[-third:])


def growth(measure: str, values: Sequence[float], operations: Sequence[float], steps: Sequence[float]) -> Growth:
    """How a measure has grown; ``operations`` and ``steps`` have been done when each of ``values`` was taken.

    Raises:
        ValueError: fewer than :data:`FEWEST` values.
    """
    if len(values) < FEWEST:
        raise ValueError(
            f"growth of {measure}: expected {FEWEST} values or more, found {len(values)}. Let it run longer"
        )

    def between(series: Sequence[float]) -> float:
        first, last = ends(series)
        return last - first

    tolerance = MEMORY_TOLERANCE if measure.endswith("_bytes") else 0
    return Growth(measure, between(values), tolerance, between(operations), between(steps))
