"""One launcher on each machine of a file, started by MPI: ``accelerate-cpp launch --mpirun_hostfile``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.machines import DEFAULT_PORT, Launchers
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.workers import exec_with_parent as tied
from accelerate_cpp.launch.workers.over_ssh import host_lines, is_carried

_PROGRAM = "mpirun"


def hosts_of(path: Path) -> list[str]:
    """The machines that a file of MPI's names, in lines such as ``gpu1``, ``gpu1 slots=4`` or ``gpu1:4``.

    Raises:
        InvalidArgument: the file cannot be read or names none.
    """
    hosts = [re.sub(r":\d+$", "", words[0]) for _, words, _ in host_lines(path, "--mpirun_hostfile")]
    if not hosts:
        raise InvalidArgument(f"--mpirun_hostfile {path}: expected at least one machine, but there is none")
    return [*dict.fromkeys(hosts)]


def launchers_to_come(path: Path, num_machines: int | None, address: str | None) -> Launchers:
    """The launchers that MPI will start, as the one with rank 0 will see them.

    Args:
        path: the file with the machines.
        num_machines: how many of them take part; ``None``: all.
        address: of the first; ``None``: its name in the file.

    Raises:
        InvalidArgument: there is no such file, or it names fewer machines.
    """
    hosts = hosts_of(path)
    count = len(hosts) if num_machines is None else num_machines
    if count > len(hosts):
        raise InvalidArgument(f"--mpirun_hostfile {path}: names {len(hosts)} of the {count} machines of num_machines")
    return Launchers(count, address=address or hosts[0], port=DEFAULT_PORT, source=f"--mpirun_hostfile {path}")


def mpirun_command(
    path: Path, launchers: Launchers, arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The command that makes MPI start this same launch on each machine.

    Args:
        path: the file with the machines.
        launchers: that it has to start.
        arguments: of this launch.
        environ: of this launch; ``os.environ`` when ``None``.

    Raises:
        InvalidArgument: there is no known MPI here.
    """
    count = launchers.count
    told = ["--main_process_ip", str(launchers.address)] if count > 1 else []
    launcher = [*module_program("accelerate_cpp.commands.launch"), *told, *arguments]
    # Whatever ends MPI's daemon on a machine ends the launcher there, and that its workers.
    started = [sys.executable, tied.__file__, *launcher]
    if _is_open_mpi():
        # Its default binds each process, here each launcher with all its workers, to one core.
        where = ["--hostfile", str(path), "-n", str(count), "--map-by", "ppr:1:node", "--bind-to", "none"]
        names = sorted(os.environ if environ is None else environ)
        carried = [part for name in names if is_carried(name) for part in ("-x", name)]
        return (_PROGRAM, *where, *carried, *started)
    return (_PROGRAM, "-f", str(path), "-n", str(count), "-ppn", "1", *started)


def _is_open_mpi() -> bool:
    """Whether mpirun is Open MPI's; otherwise it is Hydra, which MPICH, Intel MPI and MVAPICH have."""
    try:
        version = subprocess.run([_PROGRAM, "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise InvalidArgument(
            f"--mpirun_hostfile: {_PROGRAM} cannot be started: {error.strerror}; install Open MPI or MPICH, or start "
            "launchers over ssh with --hostfile"
        ) from error
    if "Open MPI" in version:
        return True
    if not re.search("hydra|intel|mvapich", version, re.IGNORECASE):
        first = version.strip().partition("\n")[0]
        raise InvalidArgument(
            f"--mpirun_hostfile: {_PROGRAM} --version says {first!r}: expected Open MPI, MPICH, Intel MPI or MVAPICH"
        )
    return False
