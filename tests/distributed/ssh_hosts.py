"""Two hosts, as network namespaces, that reach each other by ssh: each has a server of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from network_namespaces import Host, Unavailable, two_hosts

PATIENCE_SECONDS = 60.0
_SERVERS = "/usr/sbin:/usr/local/sbin:/sbin"


@dataclass(frozen=True)
class SshHosts:
    """The hosts, and the variables with which programs find an ``ssh`` that knows the key."""

    hosts: tuple[Host, Host]
    environment: dict[str, str]

    def inside(self, host: Host, *command: str) -> list[str]:
        """``command``, to be started on ``host``."""
        return ["nsenter", "--net", "--target", str(host.pid), *command]


@contextmanager
def two_hosts_with_ssh(folder: Path) -> Iterator[SshHosts]:
    """Two hosts; keys and configurations are in ``folder``, and no file of the user counts.

    Raises:
        Unavailable: this takes root, and Debian's packages iproute2, util-linux and openssh-server.
    """
    server = shutil.which("sshd", path=os.pathsep.join([os.environ.get("PATH", ""), _SERVERS]))
    client = shutil.which("ssh")
    if server is None or client is None:
        raise Unavailable("no sshd and ssh: Debian's packages openssh-server and openssh-client have them")
    with two_hosts() as hosts, ExitStack() as stack:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / f"key-of-{name}"], check=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # where the server wants an empty folder
        programs = folder / "programs"
        programs.mkdir()
        known = f"-F none -i {folder}/key-of-user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        (programs / "ssh").write_text(f'#!/bin/sh\nexec {client} {known} -o LogLevel=ERROR "$@"\n')
        (programs / "ssh").chmod(0o755)
        environment = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
        found = SshHosts(hosts, environment)
        for host in hosts:
            stack.enter_context(_server(found, host, server, folder))
        yield found


@contextmanager
def _server(found: SshHosts, host: Host, program: str, folder: Path) -> Iterator[None]:
    configuration = folder / f"sshd-{host.address}"
    configuration.write_text(
        f"ListenAddress {host.address}\nHostKey {folder}/key-of-host\nAuthorizedKeysFile {folder}/key-of-user.pub\n"
        "StrictModes no\nPermitRootLogin yes\nUsePAM no\nPidFile none\n"
    )
    server = subprocess.Popen(
        found.inside(host, program, "-D", "-e", "-f", str(configuration)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / f"log-of-{host.address}").open("w"),
    )
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while subprocess.run(
            found.inside(host, "ssh", host.address, "true"), env=found.environment, capture_output=True
        ).returncode:
            assert server.poll() is None, (folder / f"log-of-{host.address}").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield
    finally:
        server.terminate()
        server.wait()
