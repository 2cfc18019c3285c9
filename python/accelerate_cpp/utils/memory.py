"""Releasing memory, and finding the largest batch that fits into it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.comm.gather import all_gather
from accelerate_cpp.comm.topology import process_index, world_size
from accelerate_cpp.devices.memory import clear_device_cache as clear_device_cache
from accelerate_cpp.devices.memory import should_reduce_batch_size as should_reduce_batch_size
from accelerate_cpp.errors import AccelerateError, MismatchedCollective, PeerLost
from accelerate_cpp.utils.operations import collective_device

__getattr__ = lending("utils.memory")

_logger = logging.getLogger(__name__)

# What a rank reports to the others about an attempt.
_SUCCEEDED, _OUT_OF_MEMORY, _DISTURBED = range(3)
_AGREEMENT = "batch size agreement"
# A rank that runs out of memory can disturb a collective of the other ranks, which then fails on all of them.
_MOST_COLLISIONS = 16


def release_memory(*objects: Any) -> list[None]:
    """Collects garbage and clears the device's cache.

    Returns:
        One ``None`` for each of ``objects``: ``a, b = release_memory(a, b)`` drops the caller's references.
    """
    released = [None] * len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return released


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Callable[..., Any]:
    """Decorates ``function(batch_size, ...)``: it is called, without the batch size, until it does not run out of
    memory.

    With several processes all of them have to call it. After each try they agree: when one ran out of memory, all of
    them try again with the smallest of their next sizes. Sizes that were found too large are not tried again by later
    calls.

    Args:
        starting_batch_size: the first one to try.
        reduce_batch_size_fn: returns the next size to try; ``None`` means nine tenths of the last size, rounded down.

    Raises:
        RuntimeError: the size has reached 0.
        TypeError: the batch size was passed to the decorated function.

    Example:
        >>> from accelerate_cpp import find_executable_batch_size
        >>> @find_executable_batch_size(starting_batch_size=128)
        ... def train(batch_size):
        ...     if batch_size > 100:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size
        >>> train()  # each try takes nine tenths of the last size
        92
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = starting_batch_size

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        _refuse_batch_size(function, args)
        clear_device_cache(garbage_collection=True)
        while batch_size > 0:
            trial = _try(function, batch_size, args, kwargs)
            failed = _ranks_without_memory(trial)
            if not failed:
                return trial.result
            del trial  # and with it the objects that its exception holds
            clear_device_cache(garbage_collection=True)
            next_size = int(batch_size * 0.9) if reduce_batch_size_fn is None else reduce_batch_size_fn()
            too_large, batch_size = batch_size, _smallest(next_size)
            _tell(function, too_large, batch_size, failed)
        raise RuntimeError(
            "No executable batch size found, reached zero: even a batch of one sample does not fit into memory"
        )

    return search


@dataclass
class _Trial:
    """The outcome of one call."""

    outcome: int
    result: Any = None
    error: Exception | None = None
    """The error that a disturbed rank raises if no rank ran out of memory."""


def _try(function: Callable[..., Any], batch_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Trial:
    try:
        return _Trial(_SUCCEEDED, function(batch_size, *args, **kwargs))
    except Exception as error:
        if should_reduce_batch_size(error):
            return _Trial(_OUT_OF_MEMORY)
        if world_size() > 1 and isinstance(error, (MismatchedCollective, PeerLost)):
            return _Trial(_DISTURBED, error=error)
        raise


def _ranks_without_memory(trial: _Trial) -> list[int]:
    """The ranks that ran out of memory, as all ranks agree; raises if an attempt failed for another reason."""
    if world_size() == 1:
        return [0] if trial.outcome == _OUT_OF_MEMORY else []
    outcomes = _outcomes(trial)
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome == _OUT_OF_MEMORY]
    if not failed and trial.error is not None:
        raise trial.error
    return failed


def _outcomes(trial: _Trial) -> list[int]:
    """The outcomes of all ranks. Ranks that are still in other collectives fail in them, and then arrive here."""
    own = torch.tensor([trial.outcome], device=collective_device())
    for _ in range(_MOST_COLLISIONS):
        try:
            return [int(outcome) for outcome in all_gather([own], _AGREEMENT)[0].tolist()]
        except MismatchedCollective as error:
            trial.error = trial.error or error
        except AccelerateError as error:
            if trial.error is None:
                raise
            raise trial.error from error
    raise AccelerateError("find_executable_batch_size: the ranks do not meet") from trial.error


def _smallest(size: int) -> int:
    if world_size() == 1:
        return size
    smallest = torch.tensor([size], device=collective_device())
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return int(smallest.item())


def _tell(function: Callable[..., Any], too_large: int, batch_size: int, failed: list[int]) -> None:
    if process_index() == 0:
        ranks = f" on rank {', '.join(map(str, failed))}" if world_size() > 1 else ""
        _logger.warning(
            "%s ran out of memory%s with batch_size=%d; trying %d", function.__name__, ranks, too_large, batch_size
        )


def _refuse_batch_size(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) < len(args) + 1:
        rest = ", ".join(f"{name}={value}" for name, value in zip(parameters[1:], args[1:], strict=False))
        raise TypeError(
            f"Batch size was passed into `{function.__name__}` as the first argument, but "
            f"find_executable_batch_size passes it; call `{function.__name__}({rest})`"
        )
