"""Pinning this process to its share of the cores of its host."""

from __future__ import annotations

import logging
import os
from functools import cache

from accelerate_cpp.config import env_table
from accelerate_cpp.launch.affinity import pin_process
from accelerate_cpp.runtime import current

__all__ = ["override_numa_affinity", "set_numa_affinity"]

_logger = logging.getLogger(__name__)


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pins every thread of this process to its share of the cores, also when it is pinned already.

    The processes of a host share its cores out: each gets as many as the others and none gets another's. A process that
    trains on a GPU gets cores of the NUMA node that its GPU is attached to, where Linux tells it. Warns, and pins
    nothing, where there are fewer cores than processes, and on systems other than Linux.

    Args:
        local_process_index: rank of this process among those of its host, whose number is ``LOCAL_WORLD_SIZE``.
        verbose: log the cores at level INFO; ``None`` does so with ``ACCELERATE_DEBUG_MODE``.

    Raises:
        InvalidArgument: ``local_process_index`` is not a rank on this host.
        SystemFailure: the system refuses.
    """
    session = current.session
    if session is None:
        workers, on_gpus = int(env_table.LOCAL_WORLD_SIZE.get() or 1), not env_table.USE_CPU.get()
    else:
        workers, on_gpus = session.topology.local_world_size, session.device.type == "cuda"
    share = pin_process(local_process_index, workers, on_gpus=on_gpus)
    if env_table.DEBUG_MODE.get() if verbose is None else verbose:
        cores = env_table.render_cores(share) if share else "none"
        _logger.info("CPU affinity: local process %d is pinned to cores %s", local_process_index, cores)


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """As :func:`override_numa_affinity`, but the same call does nothing the second time."""
    _pin_once(os.getpid(), local_process_index, verbose)


@cache
def _pin_once(pid: int, local_process_index: int, verbose: bool | None) -> None:
    """A fork is another process: it inherits what was called, but has a share of its own."""
    override_numa_affinity(local_process_index, verbose)
