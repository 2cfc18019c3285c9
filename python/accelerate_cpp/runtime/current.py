"""The one global of the package: what the drop-in state classes are views of. Only root files read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate_cpp.comm.topology import process_index, world_size
from accelerate_cpp.runtime.accumulation import Accumulation

if TYPE_CHECKING:
    from accelerate_cpp.runtime.session import Session

session: Session | None = None
accumulation: Accumulation = Accumulation()


def data_size() -> int:
    """The number of processes, or groups of such, that get different batches."""
    return world_size() if session is None else session.topology.mesh.data_size


def data_rank() -> int:
    """The index of this process, or of its group, among those."""
    return process_index() if session is None else session.topology.mesh.data_rank
