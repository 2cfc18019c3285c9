"""Who is not of a run reaches nothing of it: what another user of the machine can do, and whoever looks for sockets."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from accelerate_cpp.launch.plan.host_resources import free_port
from elastic_run import first_of_two

NOBODY = 65534
SCRIPT = """
import os
import torch
from accelerate_cpp import Accelerator, shared_zeros
accelerator = Accelerator(cpu=True)
shared = shared_zeros(1000)
model = accelerator.prepare(torch.nn.Linear(64, 64))
accelerator.gather(torch.ones(100_000))
accelerator.save_state("checkpoint")
print("ready", os.getpid(), flush=True)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    with open("go") as pipe:
        pipe.readline()
accelerator.wait_for_everyone()
accelerator.gather(torch.ones(100_000))
print("whole", flush=True)
"""
NOTEBOOK = """
import runpy
from accelerate_cpp import notebook_launcher
def train():
    runpy.run_path("train.py", run_name="__main__")
notebook_launcher(train, num_processes=2)
"""
WAYS: dict[str, Callable[[], tuple[str, ...]]] = {
    "launch": lambda: ("--num_processes", "2"),
    "rounds": first_of_two,
    "torch's agent": lambda: (*first_of_two(), "--rdzv_backend", "c10d"),
}
ON_ONE_MACHINE = ("launch", "notebook")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


def command_of(way: str, folder: Path) -> list[str]:
    """What starts ``train.py`` with two ranks."""
    if way == "notebook":
        (folder / "notebook.py").write_text(NOTEBOOK)
        return [sys.executable, "notebook.py"]
    return [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", *WAYS[way](), "train.py"]


def family(pid: int) -> list[int]:
    """A process, and all that it has started, directly or not."""
    started = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError):  # of a thread that has ended
            started += [int(word) for word in path.read_text().split()]
    return [pid, *(one for child in started for one in family(child))]


@contextmanager
def running(way: str, folder: Path, temporary: Path) -> Iterator[list[int]]:
    """Two ranks in the middle of a run, with shared memory, a checkpoint and all sockets. They end well."""
    (folder / "train.py").write_text(SCRIPT)
    os.mkfifo(folder / "go")
    process = subprocess.Popen(
        command_of(way, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary), "ACCELERATE_CPP_RUN_SECRET": "open sesame"},
    )
    assert process.stdout is not None
    ranks: set[int] = set()
    lines = []
    try:
        with (folder / "go").open("r+b", buffering=0) as go:  # which waits for no reader
            for line in process.stdout:
                lines.append(line)
                ranks |= {int(number) for number in re.findall(r"ready (\d+)", line)}
                if len(ranks) == 2:
                    break
            assert len(ranks) == 2, "".join(lines)
            pids = family(process.pid)
            assert ranks < set(pids)
            yield pids
            go.write(b"\n")
            rest, _ = process.communicate(timeout=240)
        assert process.returncode == 0, rest
        assert rest.count("whole") == 2
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module", params=[*WAYS, "notebook"])
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[int], list[Path]]]:
    """The processes of a run, the first one first, its own folder, and one for temporary files that all users have."""
    with (
        tempfile.TemporaryDirectory() as temporary,
        running(request.param, own := tmp_path_factory.mktemp("run"), Path(temporary)) as pids,
    ):
        os.chmod(temporary, 0o1777)
        yield pids, [own, Path(temporary)]


def as_nobody(action: Callable[[], list[str]]) -> list[str]:
    """The lines that ``action`` returns in a process of the user ``nobody``."""
    incoming, outgoing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(incoming)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(outgoing, "\n".join(action()).encode() or b"-")
        except BaseException as error:
            os.write(outgoing, f"failed: {error!r}".encode())
        finally:
            os._exit(0)
    os.close(outgoing)
    with open(incoming, "rb") as file:
        text = file.read().decode()
    os.waitpid(child, 0)
    return [] if text == "-" else text.splitlines()


def opened(pids: list[int], folders: list[Path]) -> list[str]:
    """All that this process can open of processes and of their files."""
    found = []
    for pid in pids:
        for kind in ("fd", "map_files"):
            try:
                found += [f"/proc/{pid}/{kind}/{name}" for name in os.listdir(f"/proc/{pid}/{kind}")]
            except PermissionError:
                continue
        for number in range(200):  # also where they cannot be listed
            for flags in (os.O_RDONLY, os.O_RDWR):
                try:
                    os.close(os.open(f"/proc/{pid}/fd/{number}", flags))
                except OSError:
                    continue
                found.append(f"opened /proc/{pid}/fd/{number}")
        for name in ("environ", "mem"):
            try:
                Path(f"/proc/{pid}/{name}").read_bytes()
                found.append(f"read /proc/{pid}/{name}")
            except OSError:
                continue
    for path in [
        path for folder in folders for place, _, names in os.walk(folder) for path in map(Path(place).joinpath, names)
    ]:
        try:
            os.close(os.open(path, os.O_RDONLY))
            found.append(f"opened {path}")
        except OSError:
            continue
    return found


def of_run(pids: list[int], path: str) -> list[str]:
    """The lines of a table of sockets that belong to the run, by their inodes."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
            except FileNotFoundError:
                continue
            inodes |= {match[1]} if match else set()
    return [line for line in Path(path).read_text().splitlines() if inodes & set(line.split())]


@needs_root
def test_another_user_reaches_nothing_of_a_run(run: tuple[list[int], list[Path]]) -> None:
    assert as_nobody(lambda: opened(*run)) == []
    seen = opened(*run)  # by root, so that the search would find something
    assert any(text.startswith("read /proc") for text in seen)
    assert any(text.endswith("model.safetensors") for text in seen)
    public = run[1][1] / "public"
    public.touch()
    public.chmod(0o644)
    assert as_nobody(lambda: opened(*run)) == [f"opened {public}"]


@pytest.mark.parametrize("run", ON_ONE_MACHINE, indirect=True)
def test_a_run_on_one_machine_opens_no_port_and_leaves_no_socket_to_connect_to(
    run: tuple[list[int], list[Path]],
) -> None:
    pids, _ = run
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        assert [line for line in of_run(pids, table) if line.split()[3] == "0A"] == [], table  # it would listen
    named = [line.split()[7] for line in of_run(pids, "/proc/net/unix") if len(line.split()) > 7]
    assert [name for name in named if not name.startswith("@accelerate_cpp")] == []
    for name in named:  # a rank that has met all of its peers listens no more
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one, pytest.raises(ConnectionRefusedError):
            one.connect("\0" + name.removeprefix("@"))


def test_shared_memory_has_no_name_and_only_its_owner_may_open_it(run: tuple[list[int], list[Path]]) -> None:
    files = []
    for pid in run[0]:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                mode = os.stat(f"/proc/{pid}/fd/{name}").st_mode & 0o777
            except FileNotFoundError:
                continue
            assert not target.startswith("/dev/shm/"), target
            if "accelerate" in target and target.startswith("/memfd:"):
                files.append((target, mode))
    # A tensor of a rank, not only files of the launcher.
    assert any(target.startswith("/memfd:accelerate_cpp") for target, _ in files), files
    assert {mode for _, mode in files} == {0o600}, files


def test_a_stranger_at_the_port_of_an_elastic_run_leads_no_launcher_that_has_a_secret(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        flags = ["--cpu", "--num_processes", "2", "--num_machines", "1:2", "--main_process_ip", "127.0.0.1"]
        flags += ["--main_process_port", str(port)]
        process = subprocess.Popen(
            [sys.executable, "-m", "accelerate_cpp.commands.launch", *flags, "train.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "ACCELERATE_CPP_RUN_SECRET": "open sesame"},
        )
        listener.settimeout(240)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b'{"do": "prove", "challenge": "c"}\n')
            place = b'"address": "127.0.0.1", "port": %d' % port
            connection.sendall(b'{"do": "start", "round": 1, "rank": 0, "count": 1, %s}\n' % place)
            text, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert f"port {port}, has not shown that it knows the run's secret: expected the same ACCELERATE_CPP" in text
    assert "ran" not in text.split()


LISTENING = """
import os, re
from pathlib import Path
from accelerate_cpp.comm.process_group import connect
connect(device_type={device!r}, collectives=lambda: "gloo")
inodes = set()
for name in os.listdir("/proc/self/fd"):
    try:
        inodes.update(re.findall(r"socket:\\[(\\d+)\\]", os.readlink(f"/proc/self/fd/{{name}}")))
    except FileNotFoundError:
        pass
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            print("listens at", fields[1].partition(":")[0], flush=True)
"""
LOOPBACK = "0100007F"  # as the kernel prints 127.0.0.1


@needs_root
def test_ports_for_accelerators_are_those_of_this_machine_alone(tmp_path: Path) -> None:
    """Gloo, which carries objects beside NCCL, listens where the host's name leads: here to another interface."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n192.0.2.2 outside\n")
    (tmp_path / "train.py").write_text(LISTENING.format(device="cuda"))
    host = "ip link set lo up; ip link add far type veth peer name near; ip link set near up; ip link set far up"
    host += "; ip addr add 192.0.2.2/24 dev far"
    launch = f"{sys.executable} -m accelerate_cpp.commands.launch --num_processes 2 train.py"
    script = f"set -e; {host}; hostname outside; mount --bind hosts /etc/hosts; exec {launch}"
    done = subprocess.run(
        ["unshare", "--mount", "--uts", "--net", "sh", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    if "Operation not permitted" in done.stderr:
        pytest.skip("this machine gives the tests no network namespaces")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split("listens at")[1:]) <= {f" {LOOPBACK}\n"}, done.stdout
    assert LOOPBACK in done.stdout


def test_the_store_at_an_address_of_this_machine_alone_listens_there_alone(tmp_path: Path) -> None:
    """As where MPI starts several launchers on one machine; torch's listens on all interfaces by itself."""
    (tmp_path / "train.py").write_text(LISTENING.format(device="cpu"))
    group = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, **group},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"listens at {LOOPBACK}"]
