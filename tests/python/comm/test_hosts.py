"""Which ranks share a host, and which address Gloo uses. Several hosts for real: tests/distributed/test_hosts.py."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import C10dBackend
from accelerate_cpp.comm import hosts
from accelerate_cpp.errors import Timeout

TIMEOUT = timedelta(seconds=60)
linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="shared-memory collectives exist on Linux only")


def store_with(topic: str, *others: str) -> dist.HashStore:
    """A store in which ranks 1, 2, … have said what they have to say."""
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=100))
    for rank, text in enumerate(others, start=1):
        store.set(f"accelerate_cpp/{topic}/{rank}", text)
    return store


def addresses(monkeypatch: pytest.MonkeyPatch, default: str | None, towards: dict[str, str]) -> None:
    """This host's name stands for ``default``, and its address on the way to some others is known."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(hosts, "default_gloo_address", lambda: default)
    monkeypatch.setattr(hosts, "address_towards", towards.get)


def test_importing_the_module_loads_neither_torch_nor_the_core() -> None:
    script = "import sys, accelerate_cpp.comm.hosts; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert {"torch", "accelerate_cpp._native", "accelerate_cpp._C"}.isdisjoint(loaded)


@linux_only
def test_processes_of_one_host_have_one_identity() -> None:
    script = "from accelerate_cpp.comm.hosts import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.strip()
    assert hosts.host_identity() == other
    assert str(os.stat("/proc/self/ns/net").st_ino) in other


@linux_only
def test_another_user_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    own = hosts.host_identity()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert hosts.host_identity() != own


def test_other_systems_go_by_the_name_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert hosts.host_identity() == platform.node()


def test_hosts_are_counted_in_the_order_of_their_first_rank() -> None:
    store = store_with("host", "elsewhere", hosts.host_identity(), "far away", "elsewhere")
    assert hosts.find_hosts(store, 0, 5) == [0, 1, 0, 2, 1]


def test_a_rank_that_never_comes_is_lost() -> None:
    with pytest.raises(Timeout, match=r"rank 0 waited .* for rank 1, which did not answer"):
        hosts.find_hosts(store_with("host"), 0, 2)
    with pytest.raises(Timeout, match=r"forming a group of 2 ranks: rank 4 waited .* for rank 7, which did not answer"):
        hosts.find_hosts(store_with("host"), 0, 2, [4, 7])


@pytest.mark.parametrize(
    ("address", "expected"),
    [("10.0.0.7", True), ("fe80::1%eth0", True), ("127.0.1.1", False), ("::1", False), ("", False), (None, False)],
)
def test_only_loopback_addresses_cannot_be_reached(address: str | None, expected: bool) -> None:
    assert hosts.is_reachable(address) is expected


def test_the_default_address_is_the_first_local_one_of_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    foreign, local = (*stream, ("203.0.113.1", 0)), (*stream, ("127.0.0.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [foreign, local])
    assert hosts.default_gloo_address() == "127.0.0.1"


def test_a_name_that_stands_for_nothing_gives_no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert hosts.default_gloo_address() is None
    assert hosts.address_towards("somewhere") is None


def test_the_way_to_this_host_starts_at_itself() -> None:
    assert hosts.address_towards("127.0.0.1") == "127.0.0.1"


def test_gloo_keeps_a_default_that_others_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, "10.0.0.1", {})
    assert hosts.choose_gloo_address(store_with("address", "10.0.0.2"), 0, [0, 1]) is None


def test_a_loopback_default_gives_way_to_the_address_that_leads_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, "127.0.1.1", {"master": "10.0.0.2"})
    monkeypatch.setattr(hosts, "_address_of_store", lambda _: "master")
    store = store_with("address", "10.0.0.1")
    assert hosts.choose_gloo_address(store, 0, [0, 1]) == "10.0.0.2"
    assert store.get("accelerate_cpp/address/0") == b"10.0.0.2"


def test_the_host_of_the_store_takes_the_address_that_leads_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, None, {"master": "127.0.1.1", "10.0.0.3": "10.0.0.1", "10.9.9.9": "10.9.9.1"})
    monkeypatch.setattr(hosts, "_address_of_store", lambda _: "master")
    store = store_with("address", "10.9.9.9", "", "10.0.0.3")
    assert hosts.choose_gloo_address(store, 0, [0, 0, 1, 2]) == "10.0.0.1"
    assert store.get("accelerate_cpp/address/0") == b""


def test_the_users_interface_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses(monkeypatch, "127.0.1.1", {"10.0.0.3": "10.0.0.1"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert hosts.choose_gloo_address(store_with("address", "10.0.0.3"), 0, [0, 1]) is None


@linux_only
@pytest.mark.parametrize(
    ("backends", "here", "within"),
    [
        ("gloo", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ("cpu:gloo,cuda:nccl", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ("gloo", {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),
        ("gloo", {}, None),
        ("shm", {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, None),  # which finds out by itself who is where
    ],
)
def test_gloo_listens_near_only_while_a_group_on_one_machine_is_made(
    backends: str, here: dict[str, str], within: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ACCELERATE_CPP_RENDEZVOUS_FD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    with hosts.listening_near(backends):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == within
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@linux_only
def test_the_users_interface_stays_for_groups_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth7"}.items():
        monkeypatch.setenv(name, value)
    with hosts.listening_near("gloo"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_the_address_of_a_store_is_found_below_its_prefixes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    assert hosts._address_of_store(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"
    assert hosts._address_of_store(dist.PrefixStore("a", dist.HashStore())) is None


@pytest.mark.parametrize("address", [None, "127.0.0.1"])
def test_a_connector_joins_ranks_over_gloo(address: str | None) -> None:
    backend = hosts.gloo_connector(address, TIMEOUT)(dist.HashStore(), 0, 1)
    assert isinstance(backend, dist.ProcessGroupGloo)
    assert backend.options._timeout == TIMEOUT
    data = torch.ones(2)
    backend.allreduce([data]).wait()
    assert data.tolist() == [1, 1]


@linux_only
def test_one_host_gets_shared_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "gloo_connector", lambda *_: pytest.fail("nobody is to be reached"))
    backend = hosts.create_backend(dist.HashStore(), 0, 1, TIMEOUT)
    assert isinstance(backend, C10dBackend)
    assert backend.timeout == TIMEOUT
