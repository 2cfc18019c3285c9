"""Which launcher of an elastic run leads it, and where it listens."""

from __future__ import annotations

import errno
import socket

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.elastic import run
from accelerate_cpp.launch.elastic.run import _listener
from accelerate_cpp.launch.plan.host_resources import free_port
from accelerate_cpp.launch.plan.machines import Launchers

ELSEWHERE = "192.0.2.1"  # of documentation, so of no machine


def _leads(address: str, port: int, rank: int | None = None) -> socket.socket | None:
    return _listener(Launchers(3, rank or 0, address=address, source="a test"), address, port, rank is not None)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "localhost"])
@pytest.mark.parametrize("rank", [None, 0])
def test_the_launcher_that_leads_can_be_reached_at_other_addresses_of_its_machine(
    address: str, rank: int | None
) -> None:
    """The name of a machine may stand for an address that only it has, such as Debian's 127.0.1.1."""
    port = free_port()
    listener = _leads(address, port, rank)
    assert listener is not None
    with listener:
        for known in ("127.0.0.1", "127.0.0.2"):
            socket.create_connection((known, port)).close()
        if rank is None:
            assert _leads(address, port) is None  # another launcher of this machine


def test_a_run_may_have_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    port = free_port()
    listener = _leads("::1", port)
    assert listener is not None
    with listener:
        socket.create_connection(("::1", port)).close()


def test_the_launchers_of_other_machines_do_not_lead() -> None:
    assert _leads(ELSEWHERE, free_port()) is None
    assert _leads("127.0.0.1", free_port(), rank=1) is None


def test_a_launcher_that_may_not_listen_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(family: int, place: object) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(run, "_bound", refused)
    with pytest.raises(
        InvalidArgument, match=r"cannot listen at 127.0.0.1, port 80, of this machine \(Permission denied"
    ):
        _leads("127.0.0.1", 80)
