"""Messages that fail leave nothing behind: not in memory of the caller's, and no lock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate_cpp.launch.plan.host_resources import free_port
from processes import run_processes
from shm_scenarios import meet

pytest.importorskip("torch")

# Torch is imported inside the functions, which run in processes of their own.


def is_refused_and_not_sent_later() -> None:
    import resource

    import torch
    import torch.distributed as dist

    from accelerate_cpp.comm.process_group import connect

    connect(device_type="cpu")
    if dist.get_rank() == 0:
        dist.send(torch.full((8,), 1.0), 1)  # the memory for messages of rank 0 is on its way to rank 1
        meet("sent", 0, 2)
        found = torch.empty(8)
        dist.recv(found, 1)
        assert found[0] == 5.0
        return
    meet("sent", 1, 2)  # in a collective, this rank would take in the memory if it had to wait for long
    data = torch.full((8,), 3.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))  # also where a thread closes one meanwhile
    with pytest.raises(Exception, match="open files"):
        dist.isend(data, 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    data.fill_(-777.0)  # it is the caller's again
    dist.isend(torch.full((8,), 5.0), 0).wait()


def test_a_message_that_was_refused_is_not_sent_later() -> None:
    run_processes(is_refused_and_not_sent_later, 2)


LOSES_A_HOST = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import accelerate_cpp.comm.hosts as hosts
from accelerate_cpp.comm.process_group import connect
rank = int(os.environ["RANK"])
hosts.host_identity = lambda: f"host {rank}"
connect(device_type="cpu")
dist.barrier()
if rank == 1:
    def receive():
        while True:
            dist.recv(torch.empty(4), 0, tag=1)
            got.set()
    got = threading.Event()
    threading.Thread(target=receive, daemon=True).start()
    got.wait()
    os.kill(os.getpid(), signal.SIGKILL)
lost = []
def send():
    try:
        while True:
            dist.isend(torch.ones(4), 1, tag=1)
    except Exception as error:
        lost.append(error)
def ask():
    try:
        work = dist.irecv(torch.empty(4), 1, tag=2)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()
    except Exception as error:
        lost.append(error)
threads = [threading.Thread(target=one) for one in (send, ask)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print([type(error).__name__ for error in lost], flush=True)
os._exit(0)
"""


def test_a_lost_host_does_not_stop_a_process_in_which_one_thread_sends_and_another_asks(tmp_path: Path) -> None:
    (tmp_path / "loses.py").write_text(LOSES_A_HOST)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "loses.py"],
            cwd=tmp_path,
            env={**os.environ, **group, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, _ = ranks[0].communicate(timeout=240)
        assert out == "['PeerLost', 'PeerLost']\n"
        assert ranks[0].returncode == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
