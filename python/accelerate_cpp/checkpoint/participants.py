"""The processes that save or load a checkpoint: all of them together, or one by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch.distributed as dist

from accelerate_cpp.comm.meeting import Meeting
from accelerate_cpp.comm.topology import Topology
from accelerate_cpp.errors import InvalidArgument, OtherRankFailed, PeerLost

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Participants:
    """This process among the others.

    Attributes:
        topology: its place; the process with local rank 0 of each host moves the written folder.
        group: the process group; ``None`` is the default group.
        meeting: finds the ranks that are in the same call, if that can be known before all of them are; others may be
            in other collectives.
        alone: whether this process acts alone, without the others.
        here: the ranks that were in the same call when that was asked last; ``None`` if all are expected.
    """

    topology: Topology = field(default_factory=Topology)
    group: dist.ProcessGroup | None = None
    meeting: Meeting | None = None
    alone: bool = False
    here: Sequence[int] | None = None

    @property
    def num_together(self) -> int:
        """The number of processes that take part."""
        return 1 if self.alone else self.topology.world_size

    @property
    def place(self) -> int:
        """The rank of this process among those that take part."""
        return 0 if self.alone else self.topology.rank

    @property
    def share(self) -> tuple[int, int]:
        """This process's share of the work on files of this host, and the number of shares."""
        return (0, 1) if self.alone else (self.topology.local_rank, self.topology.local_world_size)

    @property
    def lead_a_host(self) -> bool:
        """Whether this process is the one of its host that makes and moves folders."""
        return self.share[0] == 0

    def those_in(self, call: str, with_the_dead: bool = True, needs_all: bool = False) -> Participants:
        """The same processes if all of them are in ``call``, else only this one.

        If that cannot be known, all are expected.

        Args:
            call: the name of the call, and what else tells it from others.
            with_the_dead: whether a process that has died is taken to have been on its way to this call, too.
            needs_all: whether none can do without the others.

        Raises:
            PeerLost: a process has died, and ``with_the_dead``, or has left, and all are needed. Where one has died, a
                second call returns this process alone.
            InvalidArgument: all are needed, and some are elsewhere.
        """
        if self.topology.world_size == 1 or self.meeting is None:
            return self
        try:
            here = self.meeting.meet(call)
        except PeerLost as lost:
            if with_the_dead or needs_all:
                raise
            _log.warning("%s: only rank %d takes part: %s", call.strip(), self.topology.rank, lost)
            here = [self.topology.rank]
        absent = sorted({*range(self.topology.world_size)}.difference(here))
        if absent and needs_all:
            name, missing = call.split()[0], _named(absent)
            if self.meeting.someone_has_left():
                raise PeerLost(
                    f"{name} on rank {self.topology.rank} waited for {missing}, but a rank has left the group"
                )
            raise InvalidArgument(
                f"{name} was called on {_named(here)} alone, but all ranks have parts of a checkpoint: call it on all "
                f"ranks, also on {missing}"
            )
        return replace(self, alone=bool(absent) or self.alone, here=here)

    def gather(self, value: Any) -> list[Any]:
        """The values of all participating processes, in rank order, on every rank. A collective."""
        if self.num_together == 1:
            return [value]
        values: list[Any] = [None] * self.topology.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self, what: str, attempt: Callable[[], T]) -> list[T]:
        """Calls ``attempt`` on every rank and returns what all of them returned. A collective.

        If it raises on any rank, this raises on all: the same exception on that rank, and on the others
        ``OtherRankFailed`` with ``what`` and the name of the rank. All ranks have then ended their attempts.
        """
        error: BaseException | None = None
        value: T | None = None
        try:
            value = attempt()
        except BaseException as raised:
            error = raised
        outcomes = self.gather((value, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        for rank, (_, text) in enumerate(outcomes):
            if text is not None:
                raise OtherRankFailed(f"{what}: rank {rank} failed with {text}")
        return [value for value, _ in outcomes]


def _named(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)
