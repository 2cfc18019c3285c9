"""Pinning: each worker of a host runs on cores of its own, so that none is moved away from its cache and its memory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby, pairwise

from accelerate_cpp.config import env_table
from accelerate_cpp.devices.cores import Place, gpu_nodes, read_places
from accelerate_cpp.errors import InvalidArgument, SystemFailure

Shares = tuple[tuple[int, ...], ...]
"""The cores of each worker of a host, by local rank; empty when none is pinned."""


def share_out(places: Mapping[int, Place], workers: int, nodes: Sequence[int | None] = ()) -> Shares:
    """Parts ``places``, the cores that may be used, into disjoint shares of nearly equal size.

    Cores are taken node by node and physical core by physical core, so that a share is spread over no more nodes than
    it must be; siblings stay together as long as there is a physical core for each worker.

    Args:
        nodes: the NUMA node of each worker's GPU. When all are known and have cores enough, each worker's share is of
            its GPU's node.

    Returns:
        Nothing when there are fewer cores than workers.
    """
    order = sorted(places, key=lambda core: (places[core], core))
    wanted = nodes[:workers]
    if len(wanted) == workers and None not in wanted:
        shares: dict[int, tuple[int, ...]] = {}
        for node in set(wanted):
            members = [worker for worker in range(workers) if wanted[worker] == node]
            cores = [core for core in order if places[core].node == node]
            shares.update(zip(members, _cut(cores, places, len(members)), strict=False))
        if len(shares) == workers:
            return tuple(shares[worker] for worker in range(workers))
    return _cut(order, places, workers)


def _cut(order: Sequence[int], places: Mapping[int, Place], parts: int) -> Shares:
    """Cuts ``order`` between physical cores, or between siblings when there are not enough of those."""
    units = [tuple(siblings) for _, siblings in groupby(order, key=places.__getitem__)]
    if len(units) < parts:
        units = [(core,) for core in order]
    if len(units) < parts:
        return ()
    # What does not divide is spread, not given to the first: parts of equal nodes then end where the nodes do.
    borders = [part * len(units) // parts for part in range(parts + 1)]
    return tuple(tuple(core for unit in units[start:stop] for core in unit) for start, stop in pairwise(borders))


def shares_of_launch(workers: int, environ: Mapping[str, str], *, on_gpus: bool) -> Shares:
    """The cores that a launch pins each of its workers to: all that it may use itself, shared out.

    A CPU quota makes no share smaller: it limits how long cores are used, not which, and neighbours on the host that
    all kept to the first cores would crowd there. Warns, and pins nothing, where pinning is impossible.
    """
    shares, problem = _shares(_usable(), workers, gpu_nodes(environ) if on_gpus else ())
    if problem:
        warnings.warn(problem, stacklevel=3)
    return shares


def pin_process(
    local_rank: int,
    workers: int,
    *,
    nodes: Callable[[Mapping[str, str]], Sequence[int | None]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[int]:
    """Pins every thread of this process to its share of the cores, and returns the share, which is empty if it cannot.

    The shares are the same whichever worker works them out, and however often: they are of the cores that the launch
    shared out (``ACCELERATE_CPP_CORES``), or else of those that this process could use before it was pinned.

    Args:
        nodes: the NUMA nodes of the devices that ``environ`` shows, as ``Device.numa_nodes``; ``None`` without devices.

    Raises:
        InvalidArgument: ``local_rank`` is not one of ``workers``.
        SystemFailure: the system refuses.
    """
    if not 0 <= local_rank < workers:
        raise InvalidArgument(
            f"CPU affinity: local rank {local_rank} of {workers} processes on this host: expected 0 to {workers - 1}; "
            "LOCAL_WORLD_SIZE says how many there are"
        )
    environ = env_table.environment_here() if environ is None else environ
    cores = env_table.CORES.get(environ) or _usable_before_pinning()
    shares, problem = _shares(cores, workers, () if nodes is None else nodes(environ))
    if problem and local_rank == 0:
        warnings.warn(problem, stacklevel=3)
    share = shares[local_rank] if shares else ()
    for thread in os.listdir("/proc/self/task") if share else ():
        try:
            _pin(int(thread), share)
        except ProcessLookupError:  # the thread has ended
            continue
    return list(share)


@contextmanager
def pinned(share: Sequence[int]) -> Iterator[None]:
    """Inside this block this thread runs on ``share`` only, and so do processes that it starts; an empty share changes
    nothing.

    Raises:
        SystemFailure: the system refuses.
    """
    if not share:
        yield
        return
    before = os.sched_getaffinity(0)
    _pin(0, share)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _pin(thread: int, share: Sequence[int]) -> None:
    try:
        os.sched_setaffinity(thread, share)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise SystemFailure(
            error.errno,
            f"CPU affinity: cannot pin to cores {env_table.render_cores(share)}: {error.strerror}; "
            "leave --enable_cpu_affinity (ACCELERATE_CPU_AFFINITY) out",
        ) from error


def _shares(cores: Sequence[int], workers: int, nodes: Sequence[int | None]) -> tuple[Shares, str]:
    """The shares, or why there are none."""
    if not cores:
        return (), "CPU affinity: only Linux can pin processes to cores; nothing is pinned"
    shares = share_out(read_places(cores), workers, nodes)
    if shares:
        return shares, ""
    return (), (
        f"CPU affinity: {workers} processes cannot have a core each of the {len(cores)} that they may use "
        f"({env_table.render_cores(cores)}); nothing is pinned. Start at most {len(cores)}, or leave "
        "--enable_cpu_affinity (ACCELERATE_CPU_AFFINITY) out"
    )


def _usable() -> tuple[int, ...]:
    """The cores that this thread may run on; none where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


@cache
def _usable_before_pinning() -> tuple[int, ...]:
    """What :func:`_usable` was when it was first asked for here."""
    return _usable()
