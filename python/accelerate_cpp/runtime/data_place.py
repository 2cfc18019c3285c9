"""Which part of the data this process gets: its place among the processes that get different batches."""

from __future__ import annotations

from accelerate_cpp.comm.topology import process_index, world_size
from accelerate_cpp.runtime import current


def data_size() -> int:
    """The number of processes, or groups of such, that get different batches."""
    return world_size() if current.session is None else current.session.topology.mesh.data_size


def data_rank() -> int:
    """The index of this process, or of its group, among those."""
    return process_index() if current.session is None else current.session.topology.mesh.data_rank


def data_ranks() -> list[int]:
    """Of each process, the index of its batches."""
    return [*range(world_size())] if current.session is None else current.session.topology.mesh.data_ranks()


def shares_batches() -> bool:
    """Whether several processes get the same batches."""
    return data_size() < world_size()


def reads_for_all() -> bool:
    """Whether this process reads the batches that are dispatched."""
    return process_index() == 0
