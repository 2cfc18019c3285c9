"""Launchers on several machines: network namespaces as hosts, mpirun, and what Slurm and Kubernetes say."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from accelerate_cpp.launch.plan.host_resources import free_port
from launched import STARTED, lives
from network_namespaces import Host, Unavailable, two_hosts

pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("no_launcher_is_left")

PATIENCE_SECONDS = 300.0
LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu"]
# Trains nothing: every rank names itself, and the sum over the ranks shows that all of them met.
MEETS = """
import os, sys, torch
from accelerate_cpp import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(1.0)).item()
with open(f"pid-{accelerator.process_index}", "w") as file:
    file.write(str(os.getpid()))
where = os.stat("/proc/self/ns/net").st_ino
print(accelerator.process_index, accelerator.num_processes, accelerator.local_process_index, total, where, flush=True)
accelerator.end_training()
"""

TRAINS = """
import sys, torch
from accelerate_cpp import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(600, 600)  # whose gradients are sent in parts
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    accelerator.backward(model(torch.ones(1, 600)).sum())
    optimizer.step()
    optimizer.zero_grad()
print("rank", accelerator.process_index, "trained", flush=True)
if str(accelerator.process_index) == sys.argv[1]:
    raise ValueError("after training")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "meets.py").write_text(MEETS)
    return tmp_path


def _start(folder: Path, flags: list[str], variables: Mapping[str, str], *prefix: str) -> subprocess.Popen[str]:
    launcher = subprocess.Popen(
        [*prefix, *LAUNCH, *flags],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(launcher)
    return launcher


def _lines(launchers: list[subprocess.Popen[str]]) -> list[list[str]]:
    """The words of each line that the workers of ``launchers``, all of which end well, print."""
    lines = []
    for launcher in launchers:
        out, err = launcher.communicate(timeout=PATIENCE_SECONDS)
        assert launcher.returncode == 0, err
        lines += [line.split() for line in out.splitlines()]
    return sorted(lines)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_LOCALID": "0",
}


def test_launchers_of_a_step_of_slurm_find_each_other(folder: Path) -> None:
    port = ["--main_process_port", str(free_port())]
    launchers = [
        _start(folder, [*port, "meets.py"], SLURM | {"SLURM_PROCID": node, "SLURM_NODEID": node}) for node in "01"
    ]
    assert [line[:4] for line in _lines(launchers)] == [["0", "2", "0", "2.0"], ["1", "2", "0", "2.0"]]


@pytest.mark.parametrize("failing", [None, pytest.param(3, marks=pytest.mark.long)])
def test_machines_with_several_processes_end_after_large_gradients(folder: Path, failing: int | None) -> None:
    """The thread that exchanges them between the machines waits for more, which keeps no process."""
    (folder / "train.py").write_text(TRAINS)
    port = str(free_port())
    flags = ["--num_machines", "2", "--num_processes", "4", "--main_process_ip", "127.0.0.1"]
    flags += ["--main_process_port", port]
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    another = ["unshare", "--user", "--map-root-user"]  # whose memory no other process shares
    if subprocess.run([*another, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine gives the tests no user namespaces")
    launchers = [
        _start(folder, [*flags, "--machine_rank", str(rank), "train.py", str(failing)], variables, *prefix)
        for rank, prefix in enumerate(([], another))
    ]
    texts = [launcher.communicate(timeout=PATIENCE_SECONDS) for launcher in launchers]
    codes = [launcher.returncode for launcher in launchers]
    assert codes == [0, 0] if failing is None else codes[1] == 1, texts  # those of the other machine may have left
    trained = sorted(line for out, _ in texts for line in out.splitlines())
    assert trained == [f"rank {rank} trained" for rank in range(4)]


def test_launchers_of_a_kubernetes_job_find_each_other(folder: Path) -> None:
    told = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }
    launchers = [_start(folder, ["meets.py"], told | {"PET_NODE_RANK": node}) for node in "01"]
    assert [line[:4] for line in _lines(launchers)] == [[str(rank), "4", str(rank % 2), "4.0"] for rank in range(4)]


@pytest.fixture
def mpirun() -> list[str]:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun: Debian's package openmpi-bin has it")
    return ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]


def test_processes_of_mpirun_become_workers(folder: Path, mpirun: list[str]) -> None:
    assert [line[:4] for line in _lines([_start(folder, ["meets.py"], {}, *mpirun)])] == [
        ["0", "2", "0", "2.0"],
        ["1", "2", "1", "2.0"],
    ]


def test_failure_under_mpirun_ends_all(folder: Path, mpirun: list[str]) -> None:
    (folder / "fails.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('boom')\ntime.sleep(600)\n"
    )
    launcher = _start(folder, ["fails.py"], {}, *mpirun)
    _, err = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 1
    assert "ValueError: boom" in err


@pytest.mark.usefixtures("mpirun")
def test_mpirun_is_started_with_a_file_of_machines(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=2\n")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launcher = _start(folder, ["--mpirun_hostfile", "hosts", "--num_processes", "2", "meets.py"], root)
    assert [line[:4] for line in _lines([launcher])] == [["0", "2", "0", "2.0"], ["1", "2", "1", "2.0"]]


class Cluster:
    """Two hosts, reached by a program that stands for ssh: it knows them by their addresses."""

    def __init__(self, hosts: tuple[Host, Host], folder: Path) -> None:
        self.hosts = hosts
        cases = "\n".join(f"{host.address}) pid={host.pid} ;;" for host in hosts)
        ssh = folder / "fake-ssh"
        ssh.write_text(
            f'#!/bin/sh\nto=$1; shift\ncase $to in\n{cases}\nesac\nexec nsenter --net --target $pid sh -c "$*"\n'
        )
        ssh.chmod(0o755)
        (folder / "hosts").write_text("".join(f"{host.address} slots=2\n" for host in hosts))
        self.flags = ["--hostfile", "hosts", "--ssh", str(ssh)]


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    try:
        with two_hosts() as hosts:
            yield Cluster(hosts, folder)
    except Unavailable as reason:
        pytest.skip(str(reason))


def test_launchers_on_the_machines_of_a_file_train_together(folder: Path, cluster: Cluster) -> None:
    lines = _lines([_start(folder, [*cluster.flags, "meets.py"], {})])
    assert [line[:4] for line in lines] == [[str(rank), "4", str(rank % 2), "4.0"] for rank in range(4)]
    assert [line[4] for line in lines[:2]] != [line[4] for line in lines[2:]]


WAITS = MEETS.replace("accelerator.end_training()", "import time; time.sleep(600)")


def _pids(folder: Path, count: int, launcher: subprocess.Popen[str]) -> list[int]:
    """Of the workers, once all of them have met."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    files = [folder / f"pid-{rank}" for rank in range(count)]
    while not all(file.exists() and file.read_text() for file in files):
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def _until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(map(lives, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_end_of_the_first_launcher_is_the_end_of_all(folder: Path, cluster: Cluster, number: signal.Signals) -> None:
    (folder / "waits.py").write_text(WAITS)
    launcher = _start(folder, [*cluster.flags, "waits.py"], {})
    pids = _pids(folder, 4, launcher)
    launcher.send_signal(number)
    launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == (130 if number == signal.SIGINT else -number)
    _until_dead(pids)


def test_worker_killed_on_one_machine_ends_the_run_on_all(folder: Path, cluster: Cluster) -> None:
    (folder / "waits.py").write_text(WAITS)
    launcher = _start(folder, [*cluster.flags, "waits.py"], {})
    pids = _pids(folder, 4, launcher)
    os.kill(pids[3], signal.SIGKILL)
    _, err = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert f"the launcher on {cluster.hosts[1].address} failed first" in err
    assert "rank 3 (host " in err
    _until_dead(pids)


DIES_ONCE = MEETS.replace(
    "total =",
    "if accelerator.process_index == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': os.kill(os.getpid(), 9)\n"
    "total =",
)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_torchs_agents_meet_and_start_again_together(folder: Path, cluster: Cluster, backend: str) -> None:
    (folder / "dies.py").write_text(DIES_ONCE)
    flags = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", cluster.hosts[0].address]
    flags += ["--rdzv_backend", backend, "--max_restarts", "2", "--num_cpu_threads_per_process", "1"]
    launchers = [
        _start(
            folder, [*flags, "--machine_rank", str(rank), "dies.py"], {}, "nsenter", "--net", "--target", str(host.pid)
        )
        for rank, host in enumerate(cluster.hosts)
    ]
    lines = _lines(launchers)
    assert [line[:4] for line in lines] == [["0", "2", "0", "2.0"], ["1", "2", "0", "2.0"]]


@pytest.mark.long
def test_workers_of_a_killed_agent_die_with_it(folder: Path) -> None:
    (folder / "waits.py").write_text(WAITS)
    flags = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1", "--rdzv_backend", "c10d"]
    flags += ["--main_process_port", str(free_port()), "waits.py"]
    launchers = [_start(folder, flags, {}) for _ in range(2)]
    pids = _pids(folder, 2, launchers[0])
    for launcher in launchers:
        launcher.kill()
        launcher.communicate(timeout=PATIENCE_SECONDS)
    _until_dead(pids)


def test_plan_of_every_machine_is_shown_and_nothing_started(folder: Path) -> None:
    (folder / "hosts").write_text("a slots=2\nb slots=2\n")
    launcher = _start(folder, ["--hostfile=hosts", "--dry_run", "meets.py"], {"ACCELERATE_MIXED_PRECISION": "bf16"})
    out, err = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 0, err
    first, second = out.splitlines()
    assert first.startswith("a: ssh -o BatchMode=yes a ")
    assert "--machine_rank 1 --ends_with_stdin meets.py" in second
    assert "ACCELERATE_MIXED_PRECISION=bf16" in second
    assert json.dumps(str(folder))[1:-1] in second
