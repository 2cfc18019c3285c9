"""The processes of a run as a grid: along each axis they share something else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from accelerate_cpp.errors import InvalidArgument

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""From the outermost to the innermost: neighbouring ranks, which communicate fastest, split layers."""
_DATA = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Mesh:
    """The axes of a run, and the place of this process on them.

    Attributes:
        rank: of this process among all, from 0.
        sizes: processes along each of :data:`AXES`; 1 along those that are not there.
    """

    rank: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    def size(self, axis: str) -> int:
        """The number of processes along ``axis``."""
        return self.sizes.get(axis, 1)

    def place(self, axis: str) -> int:
        """The index of this process along ``axis``."""
        inner = math.prod(self.size(name) for name in AXES[AXES.index(axis) + 1 :])
        return self.rank // inner % self.size(axis)

    @property
    def world_size(self) -> int:
        """The number of all processes."""
        return math.prod(map(self.size, AXES))

    @property
    def data_size(self) -> int:
        """The number of processes, or groups of such, that get different batches."""
        return math.prod(map(self.size, _DATA))

    @property
    def data_rank(self) -> int:
        """The index among those of this process, or of its group."""
        return self.place("dp_replicate") * self.size("dp_shard") + self.place("dp_shard")

    def data_ranks(self) -> list[int]:
        """The ``data_rank`` of each rank."""
        return [Mesh(rank, self.sizes).data_rank for rank in range(self.world_size)]

    def axes_among(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The axes along which ``ranks`` are at different places, in the order of :data:`AXES`."""
        members = [Mesh(rank, self.sizes) for rank in ranks]
        return tuple(axis for axis in AXES if len({one.place(axis) for one in members}) > 1)

    def one_rank_per_batch(self) -> list[int]:
        """The ranks that compute with something else than a lower one: the first of those that split a model."""
        return [*range(0, self.world_size // self.size("pp"), self.size("tp"))]  # the outermost axis and the innermost


def mesh_of(sizes: Mapping[str, int], rank: int, world_size: int, shards: bool) -> Mesh:
    """The mesh of ``world_size`` processes.

    Args:
        sizes: those that the user asked for; without any, data parallelism over all processes.
        rank: of this process.
        shards: whether processes that no size mentions share out the parameters, instead of having a copy each.

    Raises:
        InvalidArgument: the sizes are for another number of processes.
    """
    asked = {axis: size for axis, size in sizes.items() if size > 1}
    if not asked:
        asked = {"dp_shard" if shards else "dp_replicate": world_size}
    if math.prod(asked.values()) != world_size:
        shown = " × ".join(f"{axis} {size}" for axis, size in asked.items())
        raise InvalidArgument(
            f"the mesh is of {math.prod(asked.values())} processes ({shown}), but {world_size} run; make the product "
            "of the sizes in ParallelismConfig the number of processes, or start as many"
        )
    return Mesh(rank, asked)
