"""Collectives and transfers of a step: what a rank puts in, and what the ring algorithms put on the wire for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from accelerate_cpp.errors import InvalidArgument

__all__ = ["BUCKET", "Operation", "by_kind"]

BUCKET = "bucket"
"""Gradients that ``DataParallel`` averages in place: no operation of a process group, but as much work as one."""

# By kind and number of processes n: what a rank sends as a multiple of what it puts in, and the number of messages one
# after the other, both for a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
# workstations"). A broadcast goes along the ring in pieces; its last rank sends nothing, so this is the mean.
_RING: Mapping[str, Callable[[int], tuple[Fraction, int]]] = {
    "all_reduce": lambda n: (Fraction(2 * (n - 1), n), 2 * (n - 1)),
    BUCKET: lambda n: (Fraction(2 * (n - 1), n), 2 * (n - 1)),
    "reduce_scatter": lambda n: (Fraction(n - 1, n), n - 1),
    "all_to_all": lambda n: (Fraction(n - 1, n), n - 1),
    "broadcast": lambda n: (Fraction(n - 1, n), n - 1),
    "all_gather": lambda n: (Fraction(n - 1), n - 1),
    "send": lambda n: (Fraction(1), 1),
    "receive": lambda n: (Fraction(0), 0),
}


@dataclass(frozen=True)
class Operation:
    """Equal operations of one rank.

    Attributes:
        axes: of the mesh, along which the processes that take part are at different places.
        processes: how many take part; of a transfer, how many the group has.
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"all_to_all"``, ``"broadcast"``, ``"send"``,
            ``"receive"`` or :data:`BUCKET`.
        size_bytes: what the rank puts into each of them: the tensor of an all-reduce or broadcast, its own part of an
            all-gather, all parts of a reduce-scatter or all-to-all; of a receive what arrives.
        count: how many.

    Raises:
        InvalidArgument: there is no such kind.
    """

    axes: tuple[str, ...]
    processes: int
    kind: str
    size_bytes: int
    count: int = 1

    def __post_init__(self) -> None:
        if self.kind not in _RING:
            raise InvalidArgument(f"Operation: kind={self.kind!r}; expected one of {', '.join(_RING)}")

    @property
    def sent_bytes(self) -> Fraction:
        """What the rank sends in all of them, by the ring algorithms."""
        return self.count * self.size_bytes * _RING[self.kind](self.processes)[0]

    @property
    def rounds(self) -> int:
        """How many messages come one after the other in all of them, by the ring algorithms."""
        return self.count * _RING[self.kind](self.processes)[1]


def by_kind(operations: Iterable[Operation]) -> dict[tuple[str, ...], dict[str, tuple[int, int]]]:
    """By axes and kind, how many operations there are, and the bytes that the rank puts in."""
    found: dict[tuple[str, ...], dict[str, tuple[int, int]]] = {}
    for one in operations:
        kinds = found.setdefault(one.axes, {})
        count, size_bytes = kinds.get(one.kind, (0, 0))
        kinds[one.kind] = count + one.count, size_bytes + one.count * one.size_bytes
    return found
