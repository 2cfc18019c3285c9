"""The settings that every worker of one launch gets, and the environment that carries them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.config.env_table import Variable
from accelerate_cpp.devices.affinity import Shares
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.machines import ALONE, Launchers

# A launch creates its own group: variables of an outer launch for another group must not reach its workers.
_OF_ANOTHER_GROUP = (
    env_table.RANK,
    env_table.WORLD_SIZE,
    env_table.LOCAL_RANK,
    env_table.LOCAL_WORLD_SIZE,
    env_table.LOCAL_SIZE,
    env_table.RENDEZVOUS_FD,
    env_table.BOARD,
    env_table.JOINING,
    env_table.ERROR_REPORT,
    env_table.FORK_LAUNCHED,
    env_table.CPU_AFFINITY,
    env_table.CORES,
    env_table.RESTART_COUNT,
    env_table.MAX_RESTARTS,
    env_table.USE_AGENT_STORE,
    env_table.FULL_WORLD_SIZE,
    env_table.ELASTIC_LR,
    env_table.RUN_SECRET,  # for launchers alone
)


@dataclass(frozen=True)
class ElasticSteps:
    """What the workers of a run that may go on with fewer need to take the steps that all of them take.

    Attributes:
        full_world_size: the number of workers when all launchers are there.
        lr: how learning rates follow their number.
    """

    full_world_size: int
    lr: str


@dataclass(frozen=True)
class WorkerGroup:
    """The settings that the workers of one launcher share.

    ``num_processes`` are those of this launcher, of which ``launchers`` says how many there are. ``shares`` are the
    cores of each, empty if none is pinned; ``fp8`` is the recipe, where a file says one; ``sharding`` says how models
    are sharded, if they are, and ``compiler`` how they are compiled while they are prepared; with ``alias``, scripts
    that import ``accelerate`` get this package; ``downcast_bf16`` is for torch_xla; ``elastic`` is for a run that
    may go on with fewer processes, and ``None`` in others.
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
    sharding: Mapping[Variable[Any], Any] = field(default_factory=dict)
    compiler: Mapping[Variable[Any], Any] = field(default_factory=dict)
    launchers: Launchers = ALONE
    alias: bool = False
    downcast_bf16: bool = False
    elastic: ElasticSteps | None = None

    @property
    def world_size(self) -> int:
        """The number of workers of all launchers."""
        return self.num_processes * self.launchers.count

    @property
    def ranks(self) -> range:
        """The ranks of this launcher's workers among all."""
        first = self.num_processes * self.launchers.rank
        return range(first, first + self.num_processes)

    @property
    def trains_through_deepspeed(self) -> bool:
        """Whether engines of DeepSpeed train."""
        return bool(self.sharding.get(env_table.USE_DEEPSPEED))

    def cores_of(self, worker: int) -> tuple[int, ...]:
        """The cores that this launcher's worker number ``worker`` is pinned to; none where it is not."""
        return self.shares[worker] if self.shares else ()


def threads_per_worker(num_processes: int, asked: int | None, environ: Mapping[str, str], shares: Shares = ()) -> int:
    """Intra-operator threads of each worker: as asked, else OMP_NUM_THREADS as inherited, else a share of the cores.

    Pinned workers get no more threads than the smallest of their ``shares`` has cores.
    """
    if asked is not None:
        return asked
    inherited: int | None = env_table.OMP_NUM_THREADS.get(environ)
    if inherited is not None:
        return inherited
    return max(1, min([host_resources.usable_cores() // num_processes, *map(len, shares)]))


def worker_environment(
    group: WorkerGroup,
    worker: int,
    rendezvous_fd: int,
    environ: Mapping[str, str] | None = None,
    restarts: tuple[int, int] = (0, 0),
) -> dict[str, str]:
    """The whole environment of a worker: the caller's (``environ``, default ``os.environ``) and the group's.

    A run of one worker is a plain run: it gets no rank and no group, unless it is one of sharded models.

    Args:
        worker: its number among those of its launcher.
        restarts: how many there were, and how many there may be.
    """
    first = group.num_processes * group.launchers.local_rank
    ranks = {
        env_table.RANK: group.ranks[worker],
        env_table.WORLD_SIZE: group.world_size,
        env_table.LOCAL_RANK: first + worker,
        env_table.LOCAL_WORLD_SIZE: group.num_processes * group.launchers.local_count,
        env_table.MASTER_ADDR: group.master_addr,
        env_table.MASTER_PORT: group.master_port,
        env_table.RENDEZVOUS_FD: rendezvous_fd if group.launchers.count == 1 else None,
    }
    number, most = restarts
    attempt = {env_table.RESTART_COUNT: number, env_table.MAX_RESTARTS: most} if most else {}
    shared = group_environment(group, os.environ if environ is None else environ)
    return shared | env_table.render(attempt | (ranks if group.world_size > 1 or group.sharding else {}))


def group_environment(group: WorkerGroup, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for all workers of ``group``, in addition to ``environ``."""
    base = dict(environ)
    for row in _OF_ANOTHER_GROUP:
        base.pop(row.name, None)
    if group.gpu_ids is not None:
        base["CUDA_VISIBLE_DEVICES"] = group.gpu_ids
    if group.trains_through_deepspeed:  # as with the original, the modules in this folder are found
        folders = [folder for folder in base.get("PYTHONPATH", "").split(os.pathsep) if folder]
        base["PYTHONPATH"] = os.pathsep.join([*folders, os.getcwd()])
    shared = {
        env_table.USE_CPU: group.cpu if group.cpu or not group.sharding else None,
        env_table.MIXED_PRECISION: group.mixed_precision,
        env_table.OMP_NUM_THREADS: group.num_threads,
        env_table.GRADIENT_ACCUMULATION_STEPS: group.gradient_accumulation_steps,
        env_table.DEBUG_MODE: True if group.debug else None,
        env_table.ALIAS: True if group.alias else None,
        env_table.DOWNCAST_BF16: True if group.downcast_bf16 else None,
        env_table.FULL_WORLD_SIZE: None if group.elastic is None else group.elastic.full_world_size,
        env_table.ELASTIC_LR: None if group.elastic is None else group.elastic.lr,
        env_table.FORK_LAUNCHED: True if group.fork_launched else None,
        env_table.CPU_AFFINITY: True if group.shares else None,
        env_table.CORES: chain(*group.shares) if group.shares else None,
        **group.compiler,
        **group.fp8,
        **group.sharding,
    }
    # torch reads it when it is loaded: operations that the GPU of a Mac lacks are then computed on the CPU.
    fallback = {env_table.MPS_FALLBACK: True if platform.system() == "Darwin" and not group.cpu else None}
    return env_table.render(_intel_openmp(group) | fallback) | base | env_table.render(shared)


def _intel_openmp(group: WorkerGroup) -> dict[Variable[Any], Any]:
    """The settings for Intel's OpenMP on the CPU, unless the user has set others.

    Its threads are bound to cores only where no other worker's would be bound to the same.
    """
    if not group.cpu:
        return {}
    has_cores_of_its_own = bool(group.shares) or group.world_size == 1
    return {
        env_table.KMP_BLOCKTIME: 1,
        env_table.KMP_AFFINITY: "granularity=fine,compact,1,0" if has_cores_of_its_own else None,
    }


@contextmanager
def exported(values: Mapping[Variable[Any], Any]) -> Iterator[None]:
    """Inside this block, this process's environment has ``values``; afterwards it is restored."""
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
