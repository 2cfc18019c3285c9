"""DeepSpeed's own launcher on two hosts: network namespaces that reach each other by ssh."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from launched import STARTED, lives
from network_namespaces import Unavailable
from ssh_hosts import SshHosts, two_hosts_with_ssh

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("no_launcher_is_left"),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]

PATIENCE_SECONDS = 250.0
TRICKY = 'a b;"$HOME" %n `id` \\z'
# Trains nothing: every rank writes what it knows, and the sum over the ranks shows that all of them met.
MEETS = """
import json, os, sys, time
import torch, torch.distributed as dist
from accelerate_cpp import PartialState
from accelerate_cpp.comm.topology import read_topology
state = PartialState()
total = torch.ones(1)
dist.all_reduce(total)
told = {name: os.environ.get(name) for name in ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "DS_ACCELERATOR", "TRICKY")}
known = {
    "place": [state.process_index, state.num_processes, state.local_process_index],
    "each": read_topology("cpu").local_world_size,
    "total": total.item(),
    "told": list(told.values()),
    "host": os.stat("/proc/self/ns/net").st_ino,
    "arguments": sys.argv[1:],
    "pid": os.getpid(),
}
with open(f"rank-{state.process_index}.part", "w") as file:
    json.dump(known, file)
os.rename(file.name, f"rank-{state.process_index}")
if "waits" in sys.argv:
    time.sleep(600)
dist.barrier()
if "fails" in sys.argv and state.process_index == 3:
    os._exit(7)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    try:
        with two_hosts_with_ssh(tmp_path) as found:
            (tmp_path / "hosts").write_text("".join(f"{host.address} slots=2\n" for host in found.hosts))
            (tmp_path / "meets.py").write_text(MEETS)
            yield found
    except Unavailable as reason:
        pytest.skip(str(reason))


def start(hosts: SshHosts, folder: Path, *words: str, host: int = 0) -> subprocess.Popen[str]:
    flags = ["--cpu", "--use_deepspeed", "--zero_stage", "1", "--num_machines", "2", "--deepspeed_hostfile", "hosts"]
    flags += ["--num_cpu_threads_per_process", "1"]
    launch = [sys.executable, "-m", "accelerate_cpp.commands.launch", *flags, *words]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launcher = subprocess.Popen(
        hosts.inside(hosts.hosts[host], *launch),
        cwd=folder,
        env=hosts.environment | root | {"TRICKY": TRICKY, "HF_HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    STARTED.append(launcher)
    return launcher


def known_to(folder: Path, rank: int) -> dict[str, Any]:
    return dict(json.loads((folder / f"rank-{rank}").read_text()))


def check_all_met(hosts: SshHosts, folder: Path, arguments: list[str]) -> None:
    known = [known_to(folder, rank) for rank in range(4)]
    assert [one["place"] for one in known] == [[rank, 4, rank % 2] for rank in range(4)]
    assert {(one["total"], one["each"]) for one in known} == {(4.0, 2)}
    namespaces = [os.stat(f"/proc/{host.pid}/ns/net").st_ino for host in hosts.hosts]
    assert [one["host"] for one in known] == [namespace for namespace in namespaces for _ in range(2)]
    assert all(one["told"][:2] == ["1", "cpu"] for one in known)
    assert all(one["arguments"] == arguments for one in known)


def program(name: str) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"no {name}: .ci/system-packages installs it")


@pytest.mark.parametrize(("way", "needs"), [("pdsh", "pdsh"), ("openmpi", "mpirun")])
def test_workers_on_all_machines_of_the_file_train_together(
    hosts: SshHosts, tmp_path: Path, way: str, needs: str
) -> None:
    program(needs)
    words = ["--num_processes", "4", "--deepspeed_multinode_launcher", way, "meets.py", "--x", "a-b"]
    launcher = start(hosts, tmp_path, *words)
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 0, out
    check_all_met(hosts, tmp_path, ["--x", "a-b"])
    if way == "pdsh":
        assert [known_to(tmp_path, rank)["told"][2] for rank in range(4)] == [TRICKY] * 4
    else:
        assert "TRICKY, as DeepSpeed's launcher would change the text" in out
    assert not list(tmp_path.glob(".deepspeed_env"))


def test_a_launch_on_each_machine_needs_no_ssh(hosts: SshHosts, tmp_path: Path) -> None:
    words = ["--deepspeed_multinode_launcher", "nossh", "--main_process_ip", hosts.hosts[0].address]
    launchers = [
        start(hosts, tmp_path, *words, "--machine_rank", str(rank), "meets.py", host=rank) for rank in range(2)
    ]
    for launcher in launchers:
        out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
        assert launcher.returncode == 0, out
    check_all_met(hosts, tmp_path, [])
    assert known_to(tmp_path, 3)["told"][2] == TRICKY


def test_the_exit_status_of_a_worker_elsewhere_is_that_of_the_launch(hosts: SshHosts, tmp_path: Path) -> None:
    program("pdsh")
    launcher = start(hosts, tmp_path, "meets.py", "fails")
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 7, out
    assert "DeepSpeed's launcher failed: exit code 7" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_of_the_launch_is_the_end_of_workers_elsewhere(
    hosts: SshHosts, tmp_path: Path, number: signal.Signals
) -> None:
    program("pdsh")
    launcher = start(hosts, tmp_path, "meets.py", "waits")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all((tmp_path / f"rank-{rank}").exists() for rank in range(4)):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.send_signal(number)
    out, _ = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 128 + number, out
    while any(lives(known_to(tmp_path, rank)["pid"]) for rank in range(4)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
