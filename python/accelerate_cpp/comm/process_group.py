"""Creation of torch's default process group: which store, which backend, which timeout."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from accelerate_cpp.comm.backend import BACKEND_NAME, register
from accelerate_cpp.comm.hosts import find_hosts
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument

DEFAULT_TIMEOUT = timedelta(seconds=1800)


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int, bool]:
    """Returns (store, rank, world size, whether all ranks are known to be on this host)."""
    rank, world_size = env_table.RANK.get(), env_table.WORLD_SIZE.get()
    descriptor = env_table.RENDEZVOUS_FD.get()
    if descriptor is None:
        handshake: Iterator[tuple[dist.Store, int, int]] = dist.rendezvous("env://", timeout=timeout)
        store, rank, world_size = next(handshake)
        return store, rank, world_size, False
    if rank is None or not 0 <= rank < world_size:
        raise InvalidArgument(f"RANK={rank} is not within WORLD_SIZE={world_size}")
    store = dist.FileStore(f"/proc/self/fd/{descriptor}", world_size)
    store.set_timeout(timeout)
    return store, rank, world_size, True


def choose_backend(device_type: str, hosts: list[int]) -> str:
    """The backend text for ``init_process_group``.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, …
        hosts: the host of every rank, by a number. CPU ranks of which some share a host get ours, which shares memory
            within a host and goes over Gloo between them; others gain nothing from it and get torch's own.
    """
    if device_type == "cpu":
        share = len(hosts) == 1 or len(set(hosts)) < len(hosts)
        return BACKEND_NAME if share and platform.system() == "Linux" else "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def connect(*, device_type: str, backend: str | None = None, timeout: timedelta | None = None) -> bool:
    """Creates the default process group that the environment describes.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, …: where the tensors of collectives live.
        backend: the user's choice; ``None`` picks one by :func:`choose_backend`.
        timeout: of every collective; 30 minutes when ``None``.

    Returns:
        Whether a default process group exists: ``False`` when the environment describes no group (no ``WORLD_SIZE``) or
        torch was built without distributed.
    """
    if not dist.is_available():
        return False
    if dist.is_initialized():
        return True
    if env_table.WORLD_SIZE.get() is None:
        return False
    effective = DEFAULT_TIMEOUT if timeout is None else timeout
    store, rank, world_size, one_host = _rendezvous(effective)
    if backend is None:
        one_host = one_host or device_type != "cpu"
        hosts = [0] * world_size if one_host else find_hosts(store, rank, world_size)
        backend = choose_backend(device_type, hosts)
    register()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=effective)
    return True
