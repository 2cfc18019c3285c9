"""DeepSpeed's own launcher, which starts workers on the machines of a file: when it is used, and its command."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerate_cpp.config import env_table
from accelerate_cpp.config.sharding_flags import THIS_LAUNCHER
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.environment import WorkerGroup, group_environment
from accelerate_cpp.launch.plan.machines import DEFAULT_PORT, Launchers
from accelerate_cpp.launch.plan.settings import DEFAULT, Setting

_WAY = "deepspeed_multinode_launcher"
DEFAULT_WAY = "pdsh"
ON_EACH_MACHINE = "nossh"
THROUGH_SLURM = "slurm"
THROUGH_MPI = ("openmpi", "mvapich", "mpich", "impi")
"""These start as many processes as the file has slots, and take neither a number nor a filter."""
WITHOUT_RANKS = ("openmpi", "mvapich", THROUGH_SLURM)
"""These start processes that only MPI or Slurm tells their ranks."""


@dataclass(frozen=True)
class DeepSpeedLauncher:
    """What DeepSpeed's launcher is told.

    Attributes:
        way: how it starts processes: ``pdsh``, ``openmpi``, ….
        hostfile: the file with the machines.
        exclusion, inclusion: what of it is left out, or used; at most one is set.
        each: the processes of a machine; ``None`` leaves them to the file.
        most: how many of them a machine has at most.
        first: the first machine of the file.
        launchers: the machines, one launcher each, and which this is.
    """

    way: str
    hostfile: str
    exclusion: str | None
    inclusion: str | None
    each: int | None
    most: int
    first: str
    launchers: Launchers

    @property
    def address(self) -> str | None:
        """Of rank 0, as far as it is known; Slurm chooses the machine itself."""
        return self.launchers.address or (None if self.way == THROUGH_SLURM else self.first)

    def command(self, port: int, script: Sequence[str], *, module: bool = False, no_python: bool = False) -> list[str]:
        """The command that starts it; ``port`` is that of rank 0, and ``script`` has its arguments."""
        command = ["deepspeed", "--hostfile", self.hostfile]
        if self.way == ON_EACH_MACHINE:
            command += ["--node_rank", str(self.launchers.rank), "--no_ssh"]
        command += ["--no_local_rank"]  # else the script would get an argument that is not its own
        if self.way != ON_EACH_MACHINE:
            command += ["--launcher", self.way]
        if self.exclusion is not None:
            command += ["--exclude", self.exclusion]
        elif self.inclusion is not None:
            command += ["--include", self.inclusion]
        elif self.each is not None:
            command += ["--num_gpus", str(self.each)]
        if self.launchers.address:
            command += ["--master_addr", self.launchers.address]
        command += ["--master_port", str(port)]
        command += ["--module"] if module else ["--no_python"] if no_python else []
        return [*command, *script]

    def environment(self, group: WorkerGroup) -> dict[str, str]:
        """The whole environment of the command, most of which is meant for the workers, those of ``group``."""
        environment = group_environment(group, os.environ)
        environment.pop(env_table.CORES.name, None)  # those of this machine; each process finds its own
        told = {
            env_table.DS_ACCELERATOR: "cpu" if group.cpu else None,
            env_table.MASTER_ADDR: self.address,
            env_table.MASTER_PORT: group.master_port,
        }
        return environment | env_table.render(told)


def deepspeed_launcher(settings: Mapping[str, Setting]) -> DeepSpeedLauncher | None:
    """DeepSpeed's launcher, if ``settings`` of a launch through DeepSpeed choose it; ``None`` for the own one.

    Raises:
        InvalidArgument: it needs other settings, or another file.
    """
    count, hostfile, way = (settings[name] for name in ("num_machines", "deepspeed_hostfile", _WAY))
    chosen = str(way.value or DEFAULT_WAY).lower()
    if count.value < 2 or chosen == THIS_LAUNCHER or (hostfile.value is None and way.value is None):
        return None
    if hostfile.value is None:
        raise InvalidArgument(
            f"{_WAY} is {chosen} ({way.source}), which needs a file with the machines: pass --deepspeed_hostfile, or "
            f"--{_WAY} {THIS_LAUNCHER}, which is a launcher of this package on each machine"
        )
    slots = _slots(Path(hostfile.value))
    exclusion, inclusion = (settings[f"deepspeed_{kind}_filter"] for kind in ("exclusion", "inclusion"))
    filters = [setting for setting in (exclusion, inclusion) if setting.value is not None]
    if len(filters) > 1:
        raise InvalidArgument(
            f"deepspeed_exclusion_filter ({exclusion.source}) and deepspeed_inclusion_filter ({inclusion.source}) "
            "exclude each other: leave one out"
        )
    if filters and chosen in THROUGH_MPI:
        raise InvalidArgument(
            f"{filters[0].value!r} ({filters[0].source}): {chosen} takes no filter: leave it out, and take what it "
            f"names out of {hostfile.value}"
        )
    each = None if filters else _number_of_each(chosen, slots, settings)
    return DeepSpeedLauncher(
        chosen,
        str(hostfile.value),
        exclusion.value,
        inclusion.value,
        None if chosen in THROUGH_MPI else each,
        each or max(slots.values()),
        next(iter(slots)),
        Launchers(
            count.value,
            settings["machine_rank"].value,
            address=settings["main_process_ip"].value,
            port=DEFAULT_PORT,
            source=count.source,
        ),
    )


def _slots(path: Path) -> dict[str, int]:
    """How many processes each machine of the file may have, as DeepSpeed reads it.

    Without a file, DeepSpeed would train on this machine alone.
    """
    from accelerate_cpp.launch.workers.over_ssh import host_lines  # here, as few launches have such a file

    slots: dict[str, int] = {}
    for number, words, line in host_lines(path, "--deepspeed_hostfile"):
        match = re.fullmatch(r"slots=([1-9]\d{0,8})", " ".join(words[1:2]))
        if match is None or words[0] in slots:
            raise InvalidArgument(
                f"{path}: line {number}: {line.strip()!r}: expected a name, once in the file, and slots=N"
            )
        slots[words[0]] = int(match[1])
    if not slots:
        raise InvalidArgument(f"--deepspeed_hostfile {path}: expected lines such as gpu1 slots=8, found none")
    return slots


def _number_of_each(way: str, slots: Mapping[str, int], settings: Mapping[str, Setting]) -> int | None:
    """The processes of each machine where all machines of the file take part; ``None`` leaves them to the file."""
    count, total, hostfile = (settings[name] for name in ("num_machines", "num_processes", "deepspeed_hostfile"))
    if len(slots) != count.value:
        raise InvalidArgument(
            f"{hostfile.value} ({hostfile.source}) has {len(slots)} machine{'s' * (len(slots) != 1)}, but num_machines "
            f"is {count.value} ({count.source}): change one of them"
        )
    if total.source == DEFAULT:
        return None
    in_file = sum(slots.values())
    if way in THROUGH_MPI and total.value != in_file:
        raise InvalidArgument(
            f"num_processes is {total.value} ({total.source}), but {way} starts a process for each of the {in_file} "
            f"slots in {hostfile.value}: change one of them"
        )
    if total.value < 1 or total.value % count.value:
        raise InvalidArgument(
            f"num_processes is {total.value} ({total.source}): expected a multiple of {count.value}, the number of "
            "machines, or nothing for all slots of the file"
        )
    return int(total.value // count.value)
