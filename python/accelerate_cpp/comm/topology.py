"""Which process this is among how many, over all hosts and on its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from accelerate_cpp.comm.mesh import Mesh, mesh_of
from accelerate_cpp.config import env_table


@dataclass(frozen=True)
class Topology:
    """The place of this process.

    Attributes:
        rank: among all processes, from 0.
        world_size: the number of all processes.
        local_rank: among the processes of this host, from 0.
        local_world_size: the number of processes on this host.
        backend: the backend of the default process group for this process's device; ``None`` without a group.
        mesh: what the processes share; by default nothing, as in data parallelism.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    backend: str | None = None
    mesh: Mesh = field(default_factory=Mesh)


def world_size() -> int:
    """Number of processes in torch's default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_index() -> int:
    """This process's rank in torch's default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def local_rank_of(rank: int, local_world_size: int | None) -> int:
    """``LOCAL_RANK``; without it, ranks are taken to be numbered host by host, on one host if its size is unknown."""
    local_rank = env_table.LOCAL_RANK.get()
    if local_rank is not None:
        return int(local_rank)
    return rank % local_world_size if local_world_size else rank


def local_rank_before_connecting() -> int:
    """The local rank as far as the environment tells it, for choosing a device before any process group exists."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else env_table.RANK.get() or 0
    return local_rank_of(rank, _local_world_size())


def world_size_before_connecting() -> int:
    """The number of processes, as far as the environment tells it."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else env_table.WORLD_SIZE.get() or 1


def read_topology(device_type: str) -> Topology:
    """The topology of the default process group; one process when there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return Topology()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_world_size = _local_world_size()
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank_of(rank, local_world_size),
        local_world_size=local_world_size or world_size,
        backend=_backend_for(device_type),
        mesh=mesh_of({}, rank, world_size, shards=False),
    )


def _local_world_size() -> int | None:
    """The number of processes on this host; ``None`` if no launcher says it."""
    said = env_table.LOCAL_WORLD_SIZE.get() or env_table.LOCAL_SIZE.get()
    return None if said is None else int(said)


def _backend_for(device_type: str) -> str:
    """The part of a configuration such as ``cpu:gloo,cuda:nccl`` that serves ``device_type``."""
    configuration = str(dist.get_backend_config())
    parts = dict(part.split(":", 1) for part in configuration.split(",") if ":" in part)
    return parts.get(device_type, configuration)
