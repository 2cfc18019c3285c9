"""What every worker of one launch is told, and the environment that tells it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.config.env_table import Variable
from accelerate_cpp.launch import host
from accelerate_cpp.launch.affinity import Shares

# A launch makes its own group: what an outer launch says about another group must not reach its workers.
_OF_ANOTHER_GROUP = (
    env_table.RANK,
    env_table.WORLD_SIZE,
    env_table.LOCAL_RANK,
    env_table.LOCAL_WORLD_SIZE,
    env_table.RENDEZVOUS_FD,
    env_table.FORK_LAUNCHED,
    env_table.CPU_AFFINITY,
    env_table.CORES,
)


@dataclass(frozen=True)
class WorkerGroup:
    """The settings that the workers of one launch share.

    ``shares`` are the cores of each, empty if none is pinned; ``fp8`` is the recipe, where a file says one.
    """

    num_processes: int
    cpu: bool
    mixed_precision: str
    num_threads: int
    master_addr: str
    master_port: int
    debug: bool = False
    gradient_accumulation_steps: int | None = None
    gpu_ids: str | None = None
    fork_launched: bool = False
    shares: Shares = ()
    fp8: Mapping[Variable[Any], Any] = field(default_factory=dict)

    def cores_of(self, rank: int) -> tuple[int, ...]:
        """The cores that worker ``rank`` is pinned to; none where it is not."""
        return self.shares[rank] if self.shares else ()


def threads_per_worker(num_processes: int, asked: int | None, environ: Mapping[str, str], shares: Shares = ()) -> int:
    """Intra-operator threads of each worker: as asked, else OMP_NUM_THREADS as inherited, else a share of the cores.

    Pinned workers get no more threads than the smallest of their ``shares`` has cores.
    """
    if asked is not None:
        return asked
    inherited: int | None = env_table.OMP_NUM_THREADS.get(environ)
    if inherited is not None:
        return inherited
    return max(1, min([host.usable_cores() // num_processes, *map(len, shares)]))


def worker_environment(
    group: WorkerGroup, rank: int, rendezvous_fd: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The whole environment of worker ``rank``: the caller's (``environ``, default ``os.environ``) and the group's.

    A group of one worker is a plain run: it is told of no rank and no group.
    """
    base = dict(os.environ if environ is None else environ)
    for row in _OF_ANOTHER_GROUP:
        base.pop(row.name, None)
    shared = {
        env_table.USE_CPU: group.cpu,
        env_table.MIXED_PRECISION: group.mixed_precision,
        env_table.OMP_NUM_THREADS: group.num_threads,
        env_table.GRADIENT_ACCUMULATION_STEPS: group.gradient_accumulation_steps,
        env_table.DEBUG_MODE: True if group.debug else None,
        env_table.FORK_LAUNCHED: True if group.fork_launched else None,
        env_table.CPU_AFFINITY: True if group.shares else None,
        env_table.CORES: chain(*group.shares) if group.shares else None,
        **group.fp8,
    }
    ranks = {
        env_table.RANK: rank,
        env_table.WORLD_SIZE: group.num_processes,
        env_table.LOCAL_RANK: rank,
        env_table.LOCAL_WORLD_SIZE: group.num_processes,
        env_table.MASTER_ADDR: group.master_addr,
        env_table.MASTER_PORT: group.master_port,
        env_table.RENDEZVOUS_FD: rendezvous_fd,
    }
    if group.gpu_ids is not None:
        base["CUDA_VISIBLE_DEVICES"] = group.gpu_ids
    return base | env_table.render(shared | (ranks if group.num_processes > 1 else {}))


@contextmanager
def exported(values: Mapping[Variable[Any], Any]) -> Iterator[None]:
    """Within it, this process's environment has ``values``; afterwards what it had before."""
    rendered = env_table.render(values)
    before = {name: os.environ.get(name) for name in rendered}
    os.environ.update(rendered)
    try:
        yield
    finally:
        for name, text in before.items():
            os.environ.pop(name, None)
            if text is not None:
                os.environ[name] = text


def become_worker(environment: Mapping[str, str]) -> None:
    """Makes ``environment`` the environment of this process, a forked worker."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def width_of_terminal() -> dict[str, str]:
    """``COLUMNS`` when standard error is a terminal and the caller has not set it.

    A worker's standard error is a pipe, so a progress bar in it cannot ask the terminal itself.
    """
    if "COLUMNS" in os.environ or not os.isatty(2):
        return {}
    return {"COLUMNS": str(os.get_terminal_size(2).columns)}
