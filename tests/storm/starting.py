"""How a run is started: by which program, on which hosts, and with which limits of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.storm import FOLDER, ROOT
from tests.storm.draw import Fault
from tests.storm.inside import FAULT, GROUP, MARK
from tests.storm.inside import FOLDER as FOLDER_VARIABLE

from accelerate_cpp.launch.plan.host_resources import free_port
from network_namespaces import ADDRESSES, Host

_PROGRAM = str(FOLDER / "program.py")
_LAUNCH = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu"]
_NOTEBOOK = (
    "{first}"
    "from accelerate_cpp import notebook_launcher\n"
    "from tests.storm.program import train\n"
    "notebook_launcher(train, num_processes={size})\n"
)
_CLOCK = "ACCELERATE_CPP_STORM_CLOCK"
_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
_SHARED_MEMORY_BYTES = {"full /dev/shm": 1 << 20, "tiny /dev/shm": 64 << 10}
_GROUP_BYTES = 64 << 20


def missing_for(fault: Fault) -> str:
    """What this machine lacks for the fault; empty if nothing."""
    is_root = os.geteuid() == 0
    needs = {
        "mpirun": (fault.start == "mpirun", "mpirun"),
        "ip": (fault.start == "hosts", "ip"),
        "nft": (fault.kind in ("lost packets", "cut network"), "nft"),
    }
    for needed, tool in needs.values():
        if needed and shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            return f"no command {tool}"
    if fault.kind == "clock set back" and shutil.which("cc") is None:
        return "no C compiler"
    with_root = (*_SHARED_MEMORY_BYTES, "full disk", "read-only folder", "lost packets", "cut network")
    if not is_root and (fault.start == "hosts" or fault.kind in with_root):
        return "needs root"
    return ""


@dataclass(frozen=True)
class Surroundings:
    """The folder of a run and what it holds.

    Attributes:
        folder: all that the run writes is in it: ``project``, ``tmp``, ``shm`` and the files of the storm.
        group: the control group of the process whose memory runs out.
        hosts: where its two halves run, if they are on two hosts.
    """

    folder: Path
    mark: str
    group: Path | None
    hosts: tuple[Host, Host] | None

    @property
    def shared_memory(self) -> Path:
        """What is /dev/shm for the run."""
        return self.folder / "shm"

    @property
    def project(self) -> Path:
        """What the run saves."""
        return self.folder / "project"

    @property
    def clock(self) -> Path:
        """The file that says by how much the clock of the run differs."""
        return self.folder / "clock"


def _mounted(place: Path, size_bytes: int) -> None:
    options = ("-t", "tmpfs", "-o", f"size={size_bytes}", "storm")
    subprocess.run(["mount", *options, str(place)], check=True, capture_output=True)


@contextmanager
def surroundings(fault: Fault, folder: Path, mark: str, hosts: tuple[Host, Host] | None) -> Iterator[Surroundings]:
    """What a run needs besides its programs; all of it is gone afterwards, but for ``folder``."""
    group = None
    mounts = []
    for name in ("project", "tmp", "shm"):
        (folder / name).mkdir()
    (folder / "clock").write_text("0")
    if os.geteuid() == 0:
        mounts.append(folder / "shm")
        _mounted(mounts[-1], _SHARED_MEMORY_BYTES.get(fault.kind, 1 << 30))
        if fault.kind in ("full disk", "read-only folder"):
            mounts.append(folder / "project")
            _mounted(mounts[-1], 16 << 20)
    if fault.kind == "full /dev/shm":
        fill(folder / "shm")
    if fault.kind == "out of memory" and os.access(_MEMORY_GROUPS, os.W_OK):
        group = _MEMORY_GROUPS / mark
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(_GROUP_BYTES))
    try:
        yield Surroundings(folder, mark, group, hosts)
    finally:
        for place in mounts:
            subprocess.run(["umount", "--lazy", str(place)], capture_output=True)
        if group is not None:
            with suppress(OSError):  # a process of it is still ending
                group.rmdir()


def fill(folder: Path) -> None:
    """Leaves no room in the file system of ``folder``, whatever becomes free later in the same file."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def _variables(fault: Fault, place: Surroundings) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ACCELERATE_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_"))
    }
    told = {
        FAULT: fault.render(),
        FOLDER_VARIABLE: str(place.folder),
        MARK: place.mark,
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(ROOT), str(ROOT / "notebooks"), os.environ.get("PYTHONPATH", "")])
        ),
        "TMPDIR": str(place.folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "JUPYTER_RUNTIME_DIR": str(place.folder / "tmp" / "jupyter"),
        "IPYTHONDIR": str(place.folder / "ipython"),
    }
    if place.group is not None:
        told[GROUP] = str(place.group)
    if fault.kind == "clock set back":
        told |= {"LD_PRELOAD": str(_clock_library(place.folder)), _CLOCK: str(place.clock)}
    return kept | told


def _clock_library(folder: Path) -> Path:
    """What gives a run a calendar of its own."""
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(FOLDER / "clock.c")], check=True)
    return library


def _commands(fault: Fault) -> list[list[str]]:
    """One, or on two hosts one for each."""
    size = str(fault.size)
    # Workers of a notebook are forks: most find torch loaded, as they do where the user has looked at the data first.
    notebook = _NOTEBOOK.format(size=size, first="" if fault.phase == "import" else "import torch\n")
    if fault.start == "torchrun":
        port = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        return [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", size, *port, _PROGRAM]]
    if fault.start == "notebook":
        return [[sys.executable, "-c", notebook]]
    if fault.start == "kernel":
        return [[sys.executable, str(FOLDER / "kernel.py"), notebook]]
    if fault.start == "mpirun":
        return [["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", size, *_LAUNCH, _PROGRAM]]
    flags = ["--num_processes", size]
    if fault.start == "hosts":
        flags += ["--num_machines", "2", "--main_process_ip", ADDRESSES[0], "--main_process_port", "29500"]
        return [[*_LAUNCH, *flags, "--machine_rank", machine, _PROGRAM] for machine in "01"]
    return [[*_LAUNCH, *flags, _PROGRAM]]


def start(fault: Fault, place: Surroundings) -> list[subprocess.Popen[bytes]]:
    """Starts the run. Its standard output and error are pipes."""
    started = []
    variables = _variables(fault, place)
    for number, command in enumerate(_commands(fault)):
        entered = []
        if place.hosts is not None:
            entered = ["nsenter", "--net", "--target", str(place.hosts[number].pid)]
        if os.geteuid() == 0:
            mount = f'mount --bind "{place.shared_memory}" /dev/shm && exec "$@"'
            entered += ["unshare", "--mount", "sh", "-c", mount, "sh"]
        started.append(
            subprocess.Popen(
                [*entered, *command],
                cwd=place.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
    return started


def marked(mark: str, variables: Mapping[str, str] | None = None) -> list[int]:
    """The living processes that have the mark of a run in their environment."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path(f"/proc/{name}/environ").read_bytes()
            state = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # ended meanwhile
            continue
        if wanted in environment + b"\0" and state not in "ZX":
            found.append(int(name))
    return found
