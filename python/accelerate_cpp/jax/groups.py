"""The processes whose arrays collectives of JAX combine: a group of their own, apart from that of torch's tensors.

Programs of JAX run beside the thread that started them, so their collectives may not share a group with those that this
package carries out on tensors in between.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp import _native
from accelerate_cpp.comm.backend import BACKEND_NAME, register
from accelerate_cpp.comm.process_group import DEFAULT_TIMEOUT
from accelerate_cpp.comm.timeouts import timeout_of
from accelerate_cpp.errors import Unavailable
from accelerate_cpp.frameworks.processes import Processes, processes


@dataclass(frozen=True)
class Group:
    """All processes of the run, for collectives of JAX.

    Attributes:
        number: by which the C++ module finds it.
        place: this process among them.
    """

    number: int
    place: Processes
    _process: int
    _world: Any
    _backend: Any


_group: Group | None = None


def group() -> Group:
    """The group of this process, which the first call makes. That is a collective.

    Raises:
        Unavailable: several processes on another system than Linux.
    """
    global _group
    place = processes()
    world = dist.group.WORLD if place.world_size > 1 else None
    if _group is None or _group._process != os.getpid() or _group._world is not world:
        if _group is not None:
            _native.forget_xla_group(_group.number)
        _group = _made(place, world)
    return _group


def _made(place: Processes, world: Any) -> Group:
    backend: Any
    if place.world_size == 1:
        backend = _native.create_backend(dist.HashStore(), 0, 1, DEFAULT_TIMEOUT, timedelta(0))
    elif platform.system() != "Linux":
        raise Unavailable(
            "accelerate_cpp.jax: several processes need shared memory, which this package has on Linux only; run one "
            "process here"
        )
    else:
        register()
        made: Any = dist.new_group(
            backend=BACKEND_NAME, timeout=timeout_of(world, torch.device("cpu")) or DEFAULT_TIMEOUT
        )
        backend = made._get_backend(torch.device("cpu"))
    number = _native.register_xla_group(backend.communicator, backend.timeout)
    return Group(number, place, os.getpid(), world, backend)
