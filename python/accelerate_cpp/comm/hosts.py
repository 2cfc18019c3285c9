"""Which ranks of a group share a host, and the backend that joins their shared memory with a network.

Ranks share a host when they can share memory, regardless of environment variables. torch is imported by the functions
that need it, since :mod:`accelerate_cpp.comm.backend` may not load it.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate_cpp.comm.slow_wait import SlowWait
from accelerate_cpp.config import env_table
from accelerate_cpp.errors import Timeout

if TYPE_CHECKING:
    import torch.distributed as dist

    Connect = Callable[[dist.Store, int, int], dist.Backend]

_LOOK_INTERVAL_SECONDS = 0.005

GLOO_INTERFACE: env_table.Variable[str | None] = env_table.Variable(
    "GLOO_SOCKET_IFNAME", str, str, None, "the network interface, or several, that Gloo uses"
)


def all_ranks_are_here() -> bool:
    """Whether the environment says that all ranks are on this machine."""
    count, here = env_table.WORLD_SIZE.get(), env_table.LOCAL_WORLD_SIZE.get()
    return env_table.RENDEZVOUS_FD.get() is not None or (count is not None and count == here)


@contextmanager
def listening_near(backends: str) -> Iterator[None]:
    """Where all ranks are on this machine, Gloo in groups that are made within listens where no other reaches it.

    Args:
        backends: of the group of all; ours finds out by itself who is where.
    """
    is_near = "gloo" in backends and all_ranks_are_here()
    if platform.system() != "Linux" or GLOO_INTERFACE.is_set() or not is_near:
        yield
        return
    with env_table.replaced_environment(env_table.render({GLOO_INTERFACE: "lo"})):
        yield


def host_identity() -> str:
    """A text that two processes share exactly when they can share memory.

    They need the same boot of the same kernel, the same network namespace (unix sockets have their names in it), and
    the same user, also as seen from within a user namespace.
    """
    if platform.system() != "Linux":
        return platform.node()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "user")]
    return f"{boot_id} {namespaces[0]} {namespaces[1]} {os.getuid()}"


def _exchange(
    store: dist.Store, rank: int, world_size: int, topic: str, own: str, numbers: Sequence[int] = ()
) -> list[str]:
    """The values that all ranks pass, in rank order. Messages call ranks by their ``numbers``, if there are any."""
    numbers = numbers or range(world_size)
    store.set(f"accelerate_cpp/{topic}/{rank}", own)
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stubs lack it
    wait = SlowWait(numbers[rank], world_size)
    for peer in range(world_size):
        # The store's own wait answers no Ctrl-C and reports nothing.
        while not store.check([f"accelerate_cpp/{topic}/{peer}"]):
            if wait.seconds > timeout.total_seconds():
                raise Timeout(
                    f"{wait.sentence(f'rank {numbers[peer]}')}, which did not answer; check that all ranks were started"
                )
            wait.report(f"rank {numbers[peer]}")
            time.sleep(_LOOK_INTERVAL_SECONDS)
    return [store.get(f"accelerate_cpp/{topic}/{peer}").decode() for peer in range(world_size)]


def find_hosts(store: dist.Store, rank: int, world_size: int, numbers: Sequence[int] = ()) -> list[int]:
    """The host of every rank, by a number: hosts are counted in the order of their first rank. Collective.

    Args:
        numbers: by which messages call ranks that are a part of all; empty: by their ranks here.

    Raises:
        Timeout: a rank did not come before the timeout of ``store``.
    """
    known: dict[str, int] = {}
    return [
        known.setdefault(identity, len(known))
        for identity in _exchange(store, rank, world_size, "host", host_identity(), numbers)
    ]


def default_gloo_address() -> str | None:
    """The address that Gloo binds to unless told otherwise: the first local one to which the host's name resolves."""
    try:
        candidates = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return None


def is_reachable(address: str | None) -> bool:
    """Whether other hosts can connect to this address of this one."""
    return bool(address) and not ipaddress.ip_address(str(address).partition("%")[0]).is_loopback


def address_towards(host: str) -> str | None:
    """This host's address on the way to ``host``; ``None`` when there is no way. Sends nothing."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _address_of_store(store: dist.Store) -> str | None:
    import torch.distributed as dist

    from accelerate_cpp.comm.stores import innermost  # here, as it loads torch

    found = innermost(store)
    return found.host if isinstance(found, dist.TCPStore) else None


def choose_gloo_address(store: dist.Store, rank: int, hosts: list[int], numbers: Sequence[int] = ()) -> str | None:
    """The address that Gloo must be told to bind to, or ``None`` when its own choice is right. Collective.

    Gloo goes by the host's name, which on many systems resolves to a loopback address that no other host can reach.
    Then the address on the route to the store, or to another host, is used. ``GLOO_SOCKET_IFNAME`` takes precedence
    over everything.
    """
    default = default_gloo_address()
    store_host = _address_of_store(store)
    own = default if is_reachable(default) else address_towards(store_host) if store_host else None
    addresses = _exchange(store, rank, len(hosts), "address", own if own and is_reachable(own) else "", numbers)
    if GLOO_INTERFACE.is_set() or is_reachable(default):
        return None
    if is_reachable(own):
        return own
    others = [address for peer, address in enumerate(addresses) if address and hosts[peer] != hosts[rank]]
    return next(filter(is_reachable, map(address_towards, others)), None)


@functools.cache
def gloo_connector(address: str | None, timeout: timedelta) -> Connect:
    """A function that connects ranks over Gloo, bound to ``address`` or, when ``None``, as Gloo itself chooses.

    The C++ module keeps what it is given until the process ends, so equal arguments give one function.
    """

    def connect(store: dist.Store, rank: int, size: int) -> dist.Backend:
        import torch.distributed as dist

        gloo: Any = dist.ProcessGroupGloo
        if address is None:
            backend: dist.Backend = gloo(store, rank, size, timeout)
            return backend
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._threads = 2
        options._timeout = timeout
        backend = gloo(store, rank, size, options)
        return backend

    return connect


def create_backend(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: timedelta,
    warn_after: timedelta = timedelta(seconds=30),
    numbers: Sequence[int] = (),
) -> dist.Backend:
    """Collective: the backend over shared memory for the ranks that share ``store``, wherever they are.

    On one host, only shared memory is used. On several, ranks share memory within each host, and one rank of each
    communicates with the other hosts over Gloo.

    Args:
        timeout: of every collective, and of connecting.
        warn_after: how long a wait may last before it is reported; 0 for never.
        numbers: by which messages call ranks that are a part of all; empty: by their ranks here.
    """
    from accelerate_cpp import _native

    hosts = find_hosts(store, rank, world_size, numbers)
    backend: dist.Backend
    if len(set(hosts)) == 1:
        backend = _native.create_backend(store, rank, world_size, timeout, warn_after, list(numbers))
    else:
        connect = gloo_connector(choose_gloo_address(store, rank, hosts, numbers), timeout)
        backend = _native.create_hierarchical_backend(
            store, rank, world_size, hosts, timeout, connect, warn_after, list(numbers)
        )
    return backend
