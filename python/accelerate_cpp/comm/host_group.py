"""The processes of a group that share a host: memory that all of them have mapped, and a barrier among them."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp._native import create_backend
from accelerate_cpp.comm.hosts import host_identity
from accelerate_cpp.comm.process_group import DEFAULT_TIMEOUT
from accelerate_cpp.comm.timeouts import timeout_of
from accelerate_cpp.config import env_table


class HostGroup:
    """Those processes of ``group`` that share this host. A collective of the group, whatever its backend.

    Args:
        group: of torch; ``None`` is the default group.

    Attributes:
        group: the group.
        rank: of this process in the group.
        hosts: the ranks in the group by host, in order.
        host: the index of this host among them.

    Raises:
        InvalidArgument: anywhere but on Linux, if there is more than one process.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        world = dist.group.WORLD if group is None else group
        assert world is not None
        self.group = world
        self.rank = dist.get_rank(world)
        found: list[Any] = [None] * dist.get_world_size(world)
        dist.all_gather_object(found, (host_identity(), uuid.uuid4().hex), group=world)
        by_host: dict[str, list[int]] = {}
        for rank, (identity, _) in enumerate(found):
            by_host.setdefault(identity, []).append(rank)
        self.hosts = list(by_host.values())
        self.host = next(index for index, ranks in enumerate(self.hosts) if self.rank in ranks)
        own = self.hosts[self.host]
        self._timeout = timeout_of(world, torch.device("cpu")) or DEFAULT_TIMEOUT
        store = dist.PrefixStore(f"accelerate_cpp/host/{found[own[0]][1]}", dist.distributed_c10d._get_default_store())
        warn_after = timedelta(seconds=env_table.SLOW_WAIT_SECONDS.get())
        # The backend leaves the group when the program ends.
        numbers = [dist.get_global_rank(world, rank) for rank in own]  # what messages call them
        self._backend = create_backend(store, own.index(self.rank), len(own), self._timeout, warn_after, numbers)

    @property
    def ranks(self) -> list[int]:
        """Those of this host."""
        return self.hosts[self.host]

    def barrier(self) -> None:
        """Returns when all processes of this host have come."""
        self._backend.communicator.barrier(self._timeout)

    def window(self, size_bytes: int) -> torch.Tensor:
        """Zeros of uint8, in memory that all processes of this host have mapped; a collective among them.

        It is allocated in full, has no name, and is gone with the last process that has a tensor in it.

        Raises:
            SystemFailure: on all of them, if there is not enough memory.
        """
        return self._backend.communicator.window(size_bytes, self._timeout)

    def receiver(self, rank: int) -> int | None:
        """Which process of this host gets what ``rank`` sends to it; ``None`` if that is of this host, too."""
        for index, ranks in enumerate(self.hosts):
            if rank in ranks:
                return None if index == self.host else self.ranks[ranks.index(rank) % len(self.ranks)]
        raise AssertionError(f"no rank {rank}")
