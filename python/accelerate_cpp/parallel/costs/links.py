"""How long operations take over links of given bandwidths, and which axes of a mesh leave a host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from accelerate_cpp.comm.mesh import AXES, Mesh
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.operations import Operation

__all__ = ["Links", "crosses_hosts", "groups_along"]


def groups_along(mesh: Mesh, axes: Sequence[str]) -> Iterator[list[int]]:
    """The ranks of each group that differ along ``axes`` alone, in order."""
    stride, strides = 1, {}
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= mesh.size(axis)
    offsets, bases = [0], [0]
    for axis in AXES:
        steps = [place * strides[axis] for place in range(mesh.size(axis))]
        if axis in axes:
            offsets = [offset + step for offset in offsets for step in steps]
        else:
            bases = [base + step for base in bases for step in steps]
    for base in bases:
        yield [base + offset for offset in offsets]


def crosses_hosts(mesh: Mesh, axes: Sequence[str], ranks_per_host: int) -> bool:
    """Whether a group along ``axes`` has ranks on several hosts, of which each has ``ranks_per_host`` in order."""
    return any(len({rank // ranks_per_host for rank in group}) > 1 for group in groups_along(mesh, axes))


@dataclass(frozen=True)
class Links:
    """What a cluster is like.

    Attributes:
        ranks_per_host: neighbouring ranks that share a host.
        bandwidth_within, bandwidth_between: what each rank can send while all others do, to ranks of its host and to
            those of others, in 10⁹ bytes per second.
        latency_within, latency_between: of a message, in microseconds.

    Raises:
        InvalidArgument: a number is not positive; latencies may be 0.
    """

    ranks_per_host: int = 8
    bandwidth_within: float = 400.0
    bandwidth_between: float = 50.0
    latency_within: float = 2.0
    latency_between: float = 5.0

    def __post_init__(self) -> None:
        for name in ("ranks_per_host", "bandwidth_within", "bandwidth_between"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"Links: {name}={getattr(self, name)}; expected more than 0")
        for name in ("latency_within", "latency_between"):
            if not getattr(self, name) >= 0:
                raise InvalidArgument(f"Links: {name}={getattr(self, name)}; expected 0 or more")

    def seconds(self, operations: Iterable[Operation], between_hosts: bool) -> float:
        """How long ``operations`` take one after the other: messages of the ring times latency, and bytes by bandwidth.

        Args:
            between_hosts: whether the ring leaves a host, so that its slowest link does.
        """
        bandwidth = self.bandwidth_between if between_hosts else self.bandwidth_within
        latency = self.latency_between if between_hosts else self.latency_within
        given = list(operations)
        sent, rounds = sum(one.sent_bytes for one in given), sum(one.rounds for one in given)
        return float(sent) / (bandwidth * 1e9) + rounds * latency * 1e-6
