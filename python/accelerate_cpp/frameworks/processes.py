"""The processes of a run, for programs that are not written in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate_cpp.runtime import current
from accelerate_cpp.state import PartialState


@dataclass(frozen=True)
class Processes:
    """The place of this process among those of its run.

    Attributes:
        rank: among all processes, from 0.
        world_size: the number of all processes.
        local_rank: among the processes of this host, from 0.
        local_world_size: the number of processes on this host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_rank == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on rank 0 only; arguments are those of ``print``."""
        if self.is_main_process:
            print(*args, **kwargs)


def processes() -> Processes:
    """The processes that the environment describes. The first call in a process joins them, on the CPU.

    Raises:
        AccelerateError: the group does not come about, as :class:`accelerate_cpp.PartialState` says.
    """
    PartialState(cpu=True)
    assert current.session is not None
    place = current.session.topology
    return Processes(place.rank, place.world_size, place.local_rank, place.local_world_size)
