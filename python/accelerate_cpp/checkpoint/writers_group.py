"""The process group of the threads that write checkpoints, while the training loop continues to use the default one."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist

from accelerate_cpp.checkpoint.background import BackgroundWriter
from accelerate_cpp.comm.timeouts import that_of_all


class WritersGroup:
    """One group for all writers of this process, made for the default group when it is first needed.

    A group for each would stay when its ``Accelerator`` goes: there is no moment after that which is the same on all
    ranks. Calls are in the same order on all ranks, and each waits for the writer that had the group before.
    """

    def __init__(self) -> None:
        self._world: weakref.ref[Any] | None = None
        self._group: weakref.ref[Any] | None = None  # torch keeps it as long as the default group
        self._user: weakref.ref[BackgroundWriter] | None = None

    def of(self, writer: BackgroundWriter) -> dist.ProcessGroup:
        """The group, which is the writer's until the next call. A collective."""
        before = None if self._user is None else self._user()
        if before is not None:
            before.join()
        self._user = weakref.ref(writer)
        world = dist.group.WORLD
        group: dist.ProcessGroup | None = None if self._group is None else self._group()
        if group is None or self._world is None or self._world() is not world:
            # Objects are gathered on the CPU: another thread has no current GPU of its own.
            devices = {entry.partition(":")[0] for entry in str(dist.get_backend_config()).split(",")}
            with that_of_all():
                group = dist.new_group(backend=None if devices == {"cpu"} else "gloo")
            self._world, self._group = weakref.ref(world), weakref.ref(group)
        return group


WRITERS_GROUP = WritersGroup()
"""That of this process."""
