"""The ``torch.distributed`` backend ``shm``: collectives of one host's processes through shared memory.

torch loads ``register`` through the entry point group ``torch.backends`` whenever it is imported; so this module must
import neither torch nor the C++ module before a process group is really created.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

BACKEND_NAME = "shm"


def _create(asked: Any, options: object) -> dist.Backend:
    """What ``torch.distributed`` asks for, a group of its own or all ranks; there are no ``options``."""
    from accelerate_cpp.comm.hosts import create_backend
    from accelerate_cpp.config import env_table

    warn_after = timedelta(seconds=env_table.SLOW_WAIT_SECONDS.get())
    members: Sequence[int] = asked.global_ranks_in_group  # none for the group of all
    backend: dist.Backend = create_backend(
        asked.store, asked.group_rank, asked.group_size, asked.timeout, warn_after, members
    )
    return backend


def register() -> None:
    """Makes ``torch.distributed.init_process_group("cpu:shm")`` work. May be called more than once."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])
