"""Data parallelism for JAX: the processes of a launch, their collectives inside ``jit``, batches and checkpoints."""

from __future__ import annotations

from typing import Any

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    from accelerate_cpp.errors import MissingLibrary

    raise MissingLibrary("accelerate_cpp.jax needs jax: pip install 'accelerate-cpp[jax]'") from error

from accelerate_cpp.frameworks.processes import processes as _processes
from accelerate_cpp.jax.checkpointing import load_state, save_state
from accelerate_cpp.jax.collectives import all_gather, all_reduce, barrier, broadcast, reduce_scatter
from accelerate_cpp.jax.gradients import average_gradients, broadcast_parameters
from accelerate_cpp.jax.loading import data_loader, gather_for_metrics, prepare

__all__ = [
    "all_gather",
    "all_reduce",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_parameters",
    "data_loader",
    "gather_for_metrics",
    "is_local_main_process",
    "is_main_process",
    "load_state",
    "local_rank",
    "prepare",
    "print",
    "rank",
    "reduce_scatter",
    "save_state",
    "world_size",
]


def rank() -> int:
    """The number of this process among all, from 0. The first call joins the processes of the launch.

    Example:
        >>> from accelerate_cpp.jax import rank, world_size
        >>> rank() < world_size()
        True
    """
    return _processes().rank


def world_size() -> int:
    """The number of all processes.

    Example:
        >>> from accelerate_cpp.jax import world_size
        >>> world_size() >= 1
        True
    """
    return _processes().world_size


def local_rank() -> int:
    """The number of this process among those of its host.

    Example:
        >>> from accelerate_cpp.jax import local_rank, rank
        >>> local_rank() <= rank()
        True
    """
    return _processes().local_rank


def is_main_process() -> bool:
    """Whether this is rank 0.

    Example:
        >>> from accelerate_cpp.jax import is_main_process, rank
        >>> is_main_process() == (rank() == 0)
        True
    """
    return _processes().is_main_process


def is_local_main_process() -> bool:
    """Whether this is the first process of its host.

    Example:
        >>> from accelerate_cpp.jax import is_local_main_process, local_rank
        >>> is_local_main_process() == (local_rank() == 0)
        True
    """
    return _processes().is_local_main_process


def print(*args: Any, **kwargs: Any) -> None:
    """Prints on rank 0 only; arguments are those of Python's ``print``.

    Example:
        >>> from accelerate_cpp.jax import print
        >>> print("loss", 0.5)
        loss 0.5
    """
    _processes().print(*args, **kwargs)
