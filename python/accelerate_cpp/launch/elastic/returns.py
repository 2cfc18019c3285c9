"""How long a machine waits that is lost again and again, as each of its returns ends the round of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

STEADY_SECONDS = 600.0
"""A machine that has taken part for so long is as good as one that was never lost."""

_MOST_DELAYS = 20


@dataclass
class _Losses:
    count: int = 0  # one soon after the other
    newest: float = -math.inf
    returns_at: float = -math.inf


class Returns:
    """When machines may take part again: one that is lost for the first time at once, then after longer and longer.

    Machines are known by their host names.

    Args:
        delay: seconds after the second loss; each further one doubles them, up to twenty times as many.
    """

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._losses: dict[str, _Losses] = {}

    def lose(self, machine: str, since: float, now: float) -> None:
        """A launcher of ``machine`` has taken part ``since`` then and is lost."""
        if now - since >= STEADY_SECONDS:
            self._losses.pop(machine, None)
            return
        losses = self._losses.setdefault(machine, _Losses())
        if since <= losses.newest:  # with another launcher of the same machine
            return
        losses.count, losses.newest = losses.count + 1, now
        if losses.count > 1:
            losses.returns_at = now + self._delay * min(2.0 ** min(losses.count - 2, 10), _MOST_DELAYS)

    def waits(self, machine: str, now: float) -> float:
        """The seconds that ``machine`` has to wait until it may take part again."""
        losses = self._losses.get(machine)
        return 0.0 if losses is None else max(0.0, losses.returns_at - now)

    def reason(self, machine: str, now: float) -> str:
        """Why it waits, for those who read what its launcher prints."""
        return (
            f"{machine} was lost {self._losses[machine].count} times soon after it had begun to take part, so it takes "
            f"part again in {math.ceil(self.waits(machine, now))} s, or when the run has too few machines without it"
        )
