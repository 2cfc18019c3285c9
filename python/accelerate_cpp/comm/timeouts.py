"""How long collectives of a group may last, and of the groups that are made of a part of it, which get what it has.

torch gives these 10 or 30 minutes of its own accord, whatever the program has chosen for the group of all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from accelerate_cpp.comm.hosts import listening_near


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The timeout of collectives of ``group`` on ``device``; ``None`` where there are none, or nobody tells."""
    from accelerate_cpp._native import C10dBackend

    if device not in group._device_types:
        return None
    backend: Any = group._get_backend(device)
    if isinstance(backend, C10dBackend):
        return backend.timeout
    return getattr(getattr(backend, "options", None), "_timeout", None)


@contextmanager
def that_of_all() -> Iterator[None]:
    """Groups that are made within get the timeout of the group of all processes, and are reached from where it is."""
    world = dist.group.WORLD
    timeouts = {} if world is None else {one.type: timeout_of(world, one) for one in world._device_types}
    of_all = timeouts.get("cpu") or next(filter(None, timeouts.values()), None)
    # torch asks for these where a group is made without a timeout, as meshes make theirs.
    defaults = {"default_pg_timeout": of_all, "default_pg_nccl_timeout": timeouts.get("cuda")}
    before = {name: getattr(distributed_c10d, name) for name in defaults}
    try:
        for name, timeout in defaults.items():
            setattr(distributed_c10d, name, timeout or before[name])
        with listening_near("" if world is None else str(dist.get_backend_config())):
            yield
    finally:
        for name, timeout in before.items():
            setattr(distributed_c10d, name, timeout)
