"""A session: the frozen configuration, the collaborators that were built from it, and the part that can be pickled."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accelerate_cpp._native import leave_groups
from accelerate_cpp.comm.meeting import CoreMeeting, Meeting
from accelerate_cpp.comm.mesh import mesh_of
from accelerate_cpp.comm.process_group import DEFAULT_TIMEOUT, connect, connect_at
from accelerate_cpp.comm.topology import (
    Topology,
    local_rank_before_connecting,
    read_topology,
    world_size_before_connecting,
)
from accelerate_cpp.comm.whereabouts import end_whereabouts, whereabouts
from accelerate_cpp.config import env_table
from accelerate_cpp.config.session_config import SessionConfig
from accelerate_cpp.devices.affinity import pin_process
from accelerate_cpp.devices.device import Device
from accelerate_cpp.devices.selection import select_device
from accelerate_cpp.devices.table import kind_of
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.data_parallel import core_backend
from accelerate_cpp.parallel.registry import strategy_for
from accelerate_cpp.parallel.strategy import Strategy
from accelerate_cpp.precision.precision import Precision, precision_for
from accelerate_cpp.runtime.elastic import Elastic
from accelerate_cpp.runtime.progress import ProgressReporter, open_progress


@dataclass(frozen=True)
class Session:
    """The objects that exist while training runs. Replaced as a whole when more of its configuration becomes known."""

    config: SessionConfig
    topology: Topology
    device: torch.device
    strategy: Strategy
    precision: Precision
    progress: ProgressReporter | None = None  # where a launcher shows it
    meeting: Meeting | None = None  # finds the ranks that are in the same call; None: all are
    elastic: Elastic | None = None  # where the program's settings are meant for another number of processes

    @property
    def collective_device(self) -> torch.device:
        """Where tensors are that processes tell each other something by."""
        return torch.device("cpu") if kind_of(self.device).init_method is not None else self.device

    def reconfigured(self, config: SessionConfig) -> Session:
        """The same processes and device under ``config``, with a strategy and a precision made for it."""
        _require_downcasting(config, self.device)
        if config.uses_deepspeed and self.topology.backend is None:
            _join(config, self.device)  # it needs a group also for one process
            return replace(self, topology=_topology(self.device)).reconfigured(config)
        topology = _with_mesh(self.topology, config)
        return replace(
            self,
            config=config,
            topology=topology,
            strategy=strategy_for(config, self.device, topology.mesh),
            precision=precision_for(config.casting_precision, self.device, config.fp8),
        )


class Choices(NamedTuple):
    """The part of a session's configuration that the state classes show."""

    cpu: bool
    debug: bool
    fork_launched: bool
    mixed_precision: str | None
    shards: bool
    uses_deepspeed: bool
    uses_megatron: bool
    downcast_bf16: bool


class Remembered(NamedTuple):
    """What the state classes show of a session."""

    config: Choices
    topology: Topology
    device: torch.device


def remember(session: Session | Remembered | None) -> Remembered | None:
    """The part of ``session`` that can be sent to another process; ``None`` without a session."""
    if session is None or isinstance(session, Remembered):
        return session
    config = session.config
    choices = Choices(
        config.cpu,
        config.debug,
        config.fork_launched,
        config.mixed_precision,
        config.shards,
        config.uses_deepspeed,
        config.uses_megatron,
        config.downcast_bf16,
    )
    return Remembered(choices, session.topology, session.device)


_progress: ProgressReporter | None = None  # of this process
_created: tuple[weakref.ref[Any], int] | None = None  # the default group, if it is ours, and the process that made it


def build_session(config: SessionConfig) -> Session:
    """Picks the device, connects the processes that the environment describes, and picks strategy and precision.

    The default process group is destroyed when the program ends if it was created here; a group of the caller's own is
    used as it is and left alone. With ``config.cpu_affinity`` the process is pinned to its share of the cores.
    """
    global _progress
    device = select_device(
        cpu=config.cpu,
        forced=config.device,
        local_rank=local_rank_before_connecting(),
        world_size=world_size_before_connecting(),
    )
    _require_downcasting(config, device)
    _join(config, device)
    topology = _with_mesh(_topology(device), config)
    if config.cpu_affinity:
        pin_process(topology.local_rank, topology.local_world_size, nodes=kind_of(device).numa_nodes)
    precision = precision_for(config.casting_precision, device, config.fp8)
    strategy, meeting = strategy_for(config, device, topology.mesh), _meeting(config, topology, device)
    _progress = open_progress(device)
    return Session(config, topology, device, strategy, precision, _progress, meeting, _elastic(topology.world_size))


def _elastic(world_size: int) -> Elastic | None:
    """The size of a run that a launcher lets shrink and grow, unless it is the full one."""
    full = env_table.FULL_WORLD_SIZE.get()
    return None if full in (None, world_size) else Elastic(full, world_size, env_table.ELASTIC_LR.get())


def _require_downcasting(config: SessionConfig, device: torch.device) -> None:
    """Checks that torch_xla stores the floats of a run that leaves their casting to it."""
    if config.downcast_bf16 and not kind_of(device).counts_alone:
        raise InvalidArgument(
            f"environment variable {env_table.DOWNCAST_BF16.name} (--downcast_bf16) is for TPUs, but this run is on "
            f"{device}; unset it"
        )


def _join(config: SessionConfig, device: torch.device) -> None:
    """Connects the processes, and remembers the group if that has made it."""
    global _created
    existed = dist.is_available() and dist.is_initialized()
    kind = kind_of(device)
    if kind.init_method is not None:
        _join_those_of(kind, config)
        if dist.is_initialized() and not existed:
            _created = weakref.ref(dist.group.WORLD), os.getpid()
        return
    connected = connect(
        device_type=device.type,
        collectives=kind_of(device).backend,
        backend=config.backend,
        timeout=config.timeout,
        alone=config.uses_deepspeed,
    )
    if connected and not existed:
        _created = weakref.ref(dist.group.WORLD), os.getpid()


def _join_those_of(kind: Device, config: SessionConfig) -> None:
    """Connects the processes that the package of ``kind`` has started."""
    assert kind.init_method is not None
    expected = world_size_before_connecting()
    if max(expected, kind.num_processes()) > 1:
        kind.before_joining()
        connect_at(kind.init_method, config.timeout)
    if kind.num_processes() < expected:
        raise InvalidArgument(
            f"{expected} processes on {kind.title} ({kind.type}): its package knows {kind.num_processes()}, as it has "
            "to start them itself; use accelerate-cpp launch --tpu, notebook_launcher or torchrun, or set "
            "ACCELERATE_USE_CPU=1 for a run on CPUs"
        )


def _topology(device: torch.device) -> Topology:
    topology, kind = read_topology(device.type), kind_of(device)
    if kind.init_method is None:
        return topology
    local_rank, local_world_size = kind.place_on_host()
    return replace(topology, local_rank=local_rank, local_world_size=local_world_size, backend=kind.backend())


def _with_mesh(topology: Topology, config: SessionConfig) -> Topology:
    return replace(topology, mesh=mesh_of(config.axes, topology.rank, topology.world_size, config.shards))


def _meeting(config: SessionConfig, topology: Topology, device: torch.device) -> Meeting | None:
    """What finds out which ranks are in a call: on CPUs our communicator, if every collective goes through it.

    Collectives of a library of the device are not seen: then all ranks are expected.
    """
    if topology.world_size == 1 or kind_of(device).init_method is not None:
        return None
    backend = core_backend() if device.type == "cpu" else None
    if backend is None:
        return whereabouts(config.timeout or DEFAULT_TIMEOUT)
    return CoreMeeting(backend)


def end_session(error: BaseException | None = None) -> None:
    """Leaves the other processes, once, when the program ends.

    Args:
        error: what ended it. The others then raise ``PeerLost`` with this reason wherever they wait for this process.
    """
    if _progress is not None and error is None:
        _progress.end()
    end_whereabouts(error)
    if error is not None:
        leave_groups(error)
    if _created is None or not dist.is_initialized():
        return
    group, creator = _created[0](), _created[1]
    if group is dist.group.WORLD and creator == os.getpid():  # not in a fork of it
        dist.destroy_process_group()


@atexit.register
def _end_session_at_exit() -> None:
    end_session(getattr(sys, "last_value", None))
