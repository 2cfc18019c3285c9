"""Two network namespaces of this machine as two hosts, joined by one cable.

A namespace lives as long as a process in it: here one that ends when its standard input does. So nothing is left
behind, however the tests end, and nothing has a name that another test could use.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "cable"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_CLONE_NEWNET = 0x40000000


def find_nft() -> str | None:
    """The command that makes rules for packets, if there is one."""
    return shutil.which("nft", path=f"{os.environ['PATH']}:/usr/sbin")


class Unavailable(Exception):
    """This machine gives the tests no network namespaces; the text says why."""


@dataclass(frozen=True)
class Host:
    """One namespace. ``pid`` is a process in it; ``address`` is the host's, the same for ever."""

    pid: int
    address: str

    def enter(self) -> None:
        """Moves the calling thread, and the threads and processes that it starts from now on, to this host."""
        with Path(f"/proc/{self.pid}/ns/net").open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self) -> None:
        """Nothing gets over the cable any more, and neither side is told."""
        self.nft("add", "table", "inet", "cut")
        for hook, direction in (("input", "iifname"), ("output", "oifname")):
            self.nft(*f"add chain inet cut {hook} {{ type filter hook {hook} priority 0 ; }}".split())
            self.nft(*f"add rule inet cut {hook} {direction} {INTERFACE} drop".split())

    def mend(self) -> None:
        """Takes back :meth:`cut`."""
        self.nft("delete", "table", "inet", "cut")

    def nft(self, *arguments: str) -> str:
        """Changes the rules for packets of this host, or asks for them; returns what nft prints."""
        command = ["nsenter", "--net", "--target", str(self.pid), str(find_nft()), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def bytes_sent(self) -> int:
        """How many bytes this host has sent over the cable, headers included."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == INTERFACE:
                return int(counters.split()[8])
        raise OSError(f"no interface {INTERFACE} in the namespace of process {self.pid}")


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise Unavailable(f"`{' '.join(command)}` failed: {result.stderr.strip()}")


@contextmanager
def _namespace(address: str) -> Iterator[Host]:
    # It answers a line only once it runs inside.
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        try:
            holder.stdin.write("ready\n")
            holder.stdin.flush()
            inside = holder.stdout.readline() == "ready\n"
        except BrokenPipeError:
            inside = False
        if not inside:
            raise Unavailable("`unshare --net` was refused")
        yield Host(holder.pid, address)
        holder.stdin.close()


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other, and nothing else.

    Raises:
        Unavailable: this takes root, and Debian's packages iproute2 and util-linux.
    """
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        raise Unavailable(f"no command {missing[0]}" if missing else "network namespaces need root")
    with ExitStack() as stack:
        first, second = (stack.enter_context(_namespace(address)) for address in ADDRESSES)
        inside = ("nsenter", "--net", "--target")
        cable = ("type", "veth", "peer", "name", INTERFACE, "netns", str(second.pid))
        _run(*inside, str(first.pid), "ip", "link", "add", INTERFACE, *cable)
        for host in (first, second):
            ip = (*inside, str(host.pid), "ip")
            _run(*ip, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _run(*ip, "link", "set", INTERFACE, "up")
            _run(*ip, "link", "set", "lo", "up")
        yield first, second
