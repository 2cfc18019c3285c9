"""Creation of torch's default process group: which store, which backend, which timeout."""

from __future__ import annotations

import ipaddress
import platform
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from accelerate_cpp.comm.backend import BACKEND_NAME, register
from accelerate_cpp.comm.fresh_store import fresh_store
from accelerate_cpp.comm.hosts import all_ranks_are_here, listening_near
from accelerate_cpp.comm.joining import announced_joining
from accelerate_cpp.comm.slow_wait import JoiningWait
from accelerate_cpp.comm.stores import DESCRIPTORS, kept
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument

DEFAULT_TIMEOUT = timedelta(seconds=1800)
_CONNECT_SECONDS = 3.0
_LONGEST_PAUSE_SECONDS = 0.5


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Returns (store, rank, world size)."""
    rank, world_size = env_table.RANK.get(), env_table.WORLD_SIZE.get()
    descriptor = env_table.RENDEZVOUS_FD.get()
    if descriptor is None:
        shared, rank, world_size = _met(timeout)
        if env_table.USE_AGENT_STORE.get():
            shared = fresh_store(shared, rank, world_size, timeout)
        return shared, rank, world_size
    if rank is None or not 0 <= rank < world_size:
        raise InvalidArgument(f"RANK={rank} is not within WORLD_SIZE={world_size}")
    store = kept(dist.FileStore(f"{DESCRIPTORS}{descriptor}", world_size))
    store.set_timeout(timeout)
    return store, rank, world_size


def _met(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store that rank 0 holds at the address in the environment."""
    try:
        held = _held_here(timeout)
        if held is None:
            _await_rank_0(timeout)
            held = next(dist.rendezvous("env://", timeout=timeout))
        return held
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise InvalidArgument(
            f"rank 0 cannot listen on port {env_table.MASTER_PORT.get()}: another program uses it. Pass another one on "
            "all machines (accelerate-cpp launch --main_process_port, torchrun --master-port), or end that program"
        ) from error


def _held_here(timeout: timedelta) -> tuple[dist.Store, int, int] | None:
    """The store that this process holds, if it is rank 0 and no agent of torch has it.

    Torch's own rendezvous returns when all have come, and cannot say who has not; who needs a rank names it.
    """
    address, port, world_size = env_table.MASTER_ADDR.get(), env_table.MASTER_PORT.get(), env_table.WORLD_SIZE.get()
    if env_table.RANK.get() != 0 or not address or port is None or world_size is None:
        return None
    if env_table.USE_AGENT_STORE.get():
        return None
    store = dist.TCPStore(
        address,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=_loopback_listener(address, port) if all_ranks_are_here() else None,
    )
    return store, 0, world_size


def _loopback_listener(address: str, port: int) -> int | None:
    """The descriptor of a socket that listens at an address which only this machine has; torch's would listen at all.

    ``None`` for other addresses, for names, and where the port is taken: by an earlier store of this process, which
    torch uses again, or by another program, which torch reports.
    """
    try:
        own = ipaddress.ip_address(address)
        if not own.is_loopback:
            return None
        family = socket.AF_INET6 if own.version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN).detach()
    except (ValueError, OSError):
        return None


def _await_rank_0(timeout: timedelta) -> None:
    """Returns when rank 0 listens: torch's own wait takes twice the time, says nothing meanwhile, and names no rank.

    Raises:
        Timeout: it does not.
    """
    address, port, world_size = env_table.MASTER_ADDR.get(), env_table.MASTER_PORT.get(), env_table.WORLD_SIZE.get()
    rank = env_table.RANK.get()
    if not rank or not address or port is None or world_size is None or env_table.USE_AGENT_STORE.get():
        return
    wait = JoiningWait(rank, world_size, timeout, _LONGEST_PAUSE_SECONDS)
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
            return
        except OSError as error:
            awaited = f"rank 0, which does not listen at {address}, port {port} ({error})"
        wait.pause(
            awaited,
            "its process has ended or was not started, or that is not the address and port of its machine, or a "
            "firewall is between them",
        )


def choose_backend(device_type: str, collectives: Callable[[], str] | None = None) -> str:
    """The backend string for ``init_process_group`` on ``device_type``: ``"cpu"``, ``"cuda"``, ….

    CPU ranks get our backend, which shares memory within a host and uses Gloo between hosts, with reachable addresses.
    """
    if device_type == "cpu":
        return BACKEND_NAME if platform.system() == "Linux" else "gloo"
    name = dist.get_default_backend_for_device(device_type) if collectives is None else collectives()
    return f"cpu:gloo,{device_type}:{name}"


def connect(
    *,
    device_type: str,
    collectives: Callable[[], str] | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    alone: bool = False,
) -> bool:
    """Creates the default process group that the environment describes.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, …: the device type of the tensors in collectives.
        collectives: tells the backend for tensors on an accelerator, if this process trains on one; torch's default
            for the type when ``None``.
        backend: the user's choice; ``None`` picks one by :func:`choose_backend`.
        timeout: of every collective; 30 minutes when ``None``.
        alone: if the environment describes no group, create one of this process alone.

    Returns:
        Whether a default process group exists: ``False`` when the environment describes no group (no ``WORLD_SIZE``) or
        torch was built without distributed.
    """
    if not dist.is_available():
        return False
    if dist.is_initialized():
        _name_default_backend()
        return True
    described = env_table.WORLD_SIZE.get() is not None
    if not (described or alone):
        return False
    effective = DEFAULT_TIMEOUT if timeout is None else timeout
    register()
    chosen = backend or choose_backend(device_type, collectives)
    if not described:
        dist.init_process_group(chosen, store=dist.HashStore(), rank=0, world_size=1, timeout=effective)
        _name_default_backend()
        return True
    with announced_joining(), listening_near(chosen):
        store, rank, world_size = _rendezvous(effective)
        dist.init_process_group(chosen, store=store, rank=rank, world_size=world_size, timeout=effective)
    _name_default_backend()
    return True


def connect_at(init_method: str, timeout: timedelta | None = None) -> None:
    """Creates the default process group at an address that a library has registered with torch, and whose ranks it
    knows. It carries objects and tensors of the CPU, over Gloo; tensors of devices are the library's to exchange.

    Raises:
        InvalidArgument: there is a group, which does not carry tensors of the CPU.
    """
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=init_method, timeout=DEFAULT_TIMEOUT if timeout is None else timeout
        )
    found = str(dist.get_backend_config())
    if not ("cpu:" in found or dist.get_backend() == "gloo"):
        raise InvalidArgument(
            f"the process group that exists (backend {dist.get_backend()!r}) carries no tensors of the CPU: leave out "
            f"init_process_group, as the first Accelerator creates a group, or create one with backend='gloo' and "
            f"init_method={init_method!r}"
        )


def _name_default_backend() -> None:
    """Of several backends with names of their own torch knows no default, and each rank would warn of that."""
    world: Any = dist.group.WORLD
    backends = {entry.partition(":")[2] for entry in str(dist.get_backend_config()).split(",")}
    own = dist.ProcessGroup.BackendType.CUSTOM
    if dist.Backend.NCCL not in backends and own in map(dist.Backend.backend_type_map.get, backends):
        world._set_default_backend(own)
