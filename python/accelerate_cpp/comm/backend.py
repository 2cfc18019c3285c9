"""The ``torch.distributed`` backend ``shm``: collectives of one host's processes through shared memory.

torch loads ``register`` through the entry point group ``torch.backends`` whenever it is imported; so this module must
import neither torch nor the C++ module before a process group is really created.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

BACKEND_NAME = "shm"


def _create(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Backend:
    from accelerate_cpp.comm.hosts import create_backend
    from accelerate_cpp.config import env_table

    warn_after = timedelta(seconds=env_table.SLOW_WAIT_SECONDS.get())
    backend: dist.Backend = create_backend(store, rank, world_size, timeout, warn_after)
    return backend


def register() -> None:
    """Makes ``torch.distributed.init_process_group("cpu:shm")`` work. May be called more than once."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, devices=["cpu"])
