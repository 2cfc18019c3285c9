"""Which launcher of an elastic run leads it, and where it listens."""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.elastic import run
from accelerate_cpp.launch.elastic.run import _is_known, _listener
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


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that no machine has, until they are taken out; nobody is asked for others."""
    names, known = ["head"], socket.getaddrinfo

    def resolve(host: str, port: int | None, **more: Any) -> Any:
        if host in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", port, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return names


def test_a_launcher_waits_until_the_name_of_the_one_that_leads_is_known(unknown: list[str]) -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        found: list[bool] = []
        waiting = threading.Thread(target=lambda: found.append(_is_known("head", 600.0, reader)))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        unknown.clear()
        waiting.join(60)
        assert found == [True]


def test_a_name_that_stays_unknown_is_told(unknown: list[str]) -> None:
    reader, writer = socket.socketpair()
    with (
        reader,
        writer,
        pytest.raises(InvalidArgument, match="head, the machine of the launcher that leads the run, is"),
    ):
        _is_known("head", 0.0, reader)


def test_a_signal_ends_the_wait_for_a_name_and_is_left_to_who_acts_on_it(unknown: list[str]) -> None:
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.send(b"\x0f")
        assert not _is_known("head", 600.0, reader)
        assert reader.recv(2) == b"\x0f"


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
