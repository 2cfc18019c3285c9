"""What a run keeps when it goes on with another number of processes than its program was written for.

The number of samples per optimizer step stays as near as whole micro-batches allow; what is left changes the learning
rate. The rule only depends on the two numbers of processes, so a run that shrinks and grows again trains as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

RULES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda share: share,
    "sqrt": lambda share: share**0.5,
    "none": lambda share: 1.0,
}
"""The factor of the learning rate by the share of the samples that an optimizer step has: in proportion (Goyal et al.,
arXiv:1706.02677), by its root, for optimizers such as Adam (Malladi et al., arXiv:2205.10287), or unchanged."""


@dataclass(frozen=True)
class Elastic:
    """The size of a run.

    Attributes:
        full: the number of processes that the settings of the program are meant for.
        present: the number of processes now.
        rule: a key of :data:`RULES`.
    """

    full: int
    present: int
    rule: str = "linear"

    def micro_batches(self, steps: int) -> int:
        """How many micro-batches each process accumulates where the full run accumulates ``steps``; at least 1."""
        return max(1, (2 * steps * self.full + self.present) // (2 * self.present))

    def share(self, given: int, used: int) -> float:
        """The samples of a step of ``used`` micro-batches, relative to those of ``given`` ones in the full run."""
        return used * self.present / (given * self.full)

    def rate_factor(self, given: int, used: int) -> float:
        """By what the learning rate is multiplied in such a step."""
        return RULES[self.rule](self.share(given, used))

    def schedule_advance(self, given: int, used: int, copies: int) -> Fraction:
        """By how many steps a schedule advances where that of the full run advances by one for each process.

        Args:
            copies: the processes now that read different batches.
        """
        return Fraction(used * copies, given)
