"""Finds the rank for which the others wait.

Ranks that train together all make as many steps a second; the slow one is the one that waits least. What counts is the
time of a step that a rank does not spend waiting. A rank is pointed out when the median of that over its last steps is
more than :data:`MARGIN_SECONDS` and :data:`MARGIN_SHARE` above that of the other ranks: one long step, as when rank 0
writes a checkpoint, is no reason, and six slow ones out of ten are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from accelerate_cpp.runtime.progress_board import Standing

MARGIN_SECONDS = 0.02
MARGIN_SHARE = 0.1
LEAST_STEPS = 3


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others, by how much in each step, and why; empty if that is unknown."""

    rank: int
    seconds: float
    cause: str = ""

    def sentence(self) -> str:
        """The sentence about it."""
        return f"rank {self.rank} is slower than the others by {self.seconds * 1e3:.0f} ms a step"


def knows_waits(standings: Sequence[Standing]) -> bool:
    """Whether any rank has waited: if none has, waiting is not measured, as with torch's own backends."""
    return any(standing.has_waited for standing in standings)


def stragglers(standings: Sequence[Standing]) -> list[Straggler]:
    """The ranks to point out, the slowest first. At most half of the ranks can be slower than the others."""
    if len(standings) < 2 or not knows_waits(standings):
        return []
    if any(len(standing.step_seconds) < LEAST_STEPS for standing in standings):
        return []
    own = {standing.rank: median_low(standing.own_seconds) for standing in standings}
    causes = {standing.rank: standing.cause for standing in standings}
    found = []
    for rank, seconds in own.items():
        others = median(other for peer, other in own.items() if peer != rank)
        if seconds > others + max(MARGIN_SECONDS, MARGIN_SHARE * others):
            found.append(Straggler(rank, seconds - others, causes[rank]))
    return sorted(found, key=lambda straggler: -straggler.seconds)[: len(standings) // 2]
