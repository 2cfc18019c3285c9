"""The rank of this launcher and the number of launchers, in a run on several machines: from flags, or detected.

Slurm, MPI and Kubernetes start one program on each machine, or several, and tell each in variables which one it is.
For launchers they are only read here. A worker's own variables (``RANK`` and the like) follow from what is found.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from accelerate_cpp.config import env_table
from accelerate_cpp.config.text import shortened
from accelerate_cpp.errors import InvalidArgument

DEFAULT_PORT = 29500
_LOOPBACK = "127.0.0.1"
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
_MOST_NODES = 1_000_000
# Ports that are neither reserved nor, by default, given out by Linux for outgoing connections.
_FIRST_DERIVED_PORT, _DERIVED_PORTS = 20000, 10000


@dataclass(frozen=True)
class Launchers:
    """The launchers of a run, of which this is one.

    Attributes:
        count: of all.
        rank: of this one among them, from 0.
        local_count: on this machine.
        local_rank: of this one among those.
        address: of the machine with rank 0; ``None`` if it is not known.
        port: on which rank 0's workers hold torch's store; ``None`` if it is not set.
        workers_each: of a launcher; ``None`` if it is not set.
        source: the source of these values.
    """

    count: int = 1
    rank: int = 0
    local_count: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int | None = None
    workers_each: int | None = None
    source: str = "default"

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.count and 0 <= self.local_rank < self.local_count):
            raise InvalidArgument(
                f"{self.source}: rank {self.rank} of {self.count} ({self.local_rank} of {self.local_count} on this "
                "machine): expected ranks from 0 to one less than their number"
            )

    @property
    def on_one_machine(self) -> bool:
        """Whether all of them are on this machine."""
        return self.local_count == self.count


ALONE = Launchers(address=_LOOPBACK)


def find_launchers(environ: Mapping[str, str]) -> Launchers:
    """The values of MPI, Kubernetes or Slurm; :data:`ALONE` if none of them started this launcher.

    Raises:
        InvalidArgument: variables that contradict each other.
    """
    for find in (_of_open_mpi, _of_hydra, _of_kubernetes, _of_slurm):
        found = find(environ)
        if found is not None and found.count > 1:
            return _with_address(found, environ)
    return ALONE


def refuse_batch_job(environ: Mapping[str, str]) -> None:
    """Raises :class:`InvalidArgument` in a Slurm job of several nodes that runs this launcher on one of them only."""
    nodes = environ.get("SLURM_JOB_NUM_NODES", "1")
    if nodes != "1" and "SLURM_JOB_ID" in environ and "SLURM_STEP_NUM_TASKS" not in environ:
        raise InvalidArgument(
            f"this Slurm job has {nodes} nodes, but this launcher was only started on one of them: start it with `srun "
            "--ntasks-per-node=1 accelerate-cpp launch …`, or pass --num_machines 1 to use only this node"
        )


def started_by_mpi(environ: Mapping[str, str]) -> bool:
    """Whether MPI started this launcher."""
    return any(find(environ) is not None for find in (_of_open_mpi, _of_hydra))


def _with_address(found: Launchers, environ: Mapping[str, str]) -> Launchers:
    """``found`` with what the environment says of rank 0, which is near if all are on one machine."""
    address = env_table.MASTER_ADDR.get(environ) or (_LOOPBACK if found.on_one_machine else found.address)
    return replace(found, address=address, port=env_table.MASTER_PORT.get(environ) or found.port)


def _of_open_mpi(environ: Mapping[str, str]) -> Launchers | None:
    name = "OMPI_COMM_WORLD_"
    if f"{name}SIZE" not in environ:
        return None
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    return Launchers(
        count=_number(environ, f"{name}SIZE"),
        rank=_number(environ, f"{name}RANK"),
        local_count=_number(environ, f"{name}LOCAL_SIZE"),
        local_rank=_number(environ, f"{name}LOCAL_RANK"),
        port=_derived_port(f"Open MPI {job}"),
        source=f"Open MPI ({name}SIZE)",
    )


def _of_hydra(environ: Mapping[str, str]) -> Launchers | None:
    """Of MPICH, Intel MPI and MVAPICH, whose process manager this is."""
    if "PMI_SIZE" not in environ or "MPI_LOCALNRANKS" not in environ:
        return None
    return Launchers(
        count=_number(environ, "PMI_SIZE"),
        rank=_number(environ, "PMI_RANK"),
        local_count=_number(environ, "MPI_LOCALNRANKS"),
        local_rank=_number(environ, "MPI_LOCALRANKID"),
        port=_derived_port(f"Hydra {environ.get('PMI_PORT', '')} {environ.get('HYDI_CONTROL_FD', '')}"),
        source="MPI (PMI_SIZE)",
    )


def _of_kubernetes(environ: Mapping[str, str]) -> Launchers | None:
    """Of Kubeflow's training jobs, which set what torchrun reads."""
    nodes = environ.get("PET_NNODES", "")
    if _NUMBER.fullmatch(nodes) is None:  # "1:4" leaves the number to an elastic rendezvous
        return None
    index = next((name for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX") if name in environ), None)
    if index is None:
        raise InvalidArgument(
            f"PET_NNODES={nodes}, but neither PET_NODE_RANK nor JOB_COMPLETION_INDEX has the number of this one; set "
            "PET_NODE_RANK, or pass --num_machines and --machine_rank"
        )
    each = environ.get("PET_NPROC_PER_NODE", "")
    return Launchers(
        count=int(nodes),
        rank=_number(environ, index),
        address=environ.get("PET_MASTER_ADDR"),
        port=_number(environ, "PET_MASTER_PORT") if "PET_MASTER_PORT" in environ else DEFAULT_PORT,
        workers_each=int(each) if _NUMBER.fullmatch(each) else None,
        source=f"Kubernetes (PET_NNODES, {index})",
    )


def _of_slurm(environ: Mapping[str, str]) -> Launchers | None:
    """Of a step of Slurm, that is of srun. A job's own variables do not tell how often a program was started."""
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    node = _number(environ, "SLURM_NODEID")
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if node >= len(tasks):
        raise InvalidArgument(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE names {len(tasks)} nodes")
    return Launchers(
        count=_number(environ, "SLURM_STEP_NUM_TASKS"),
        rank=_number(environ, "SLURM_PROCID"),
        local_count=tasks[node],
        local_rank=_number(environ, "SLURM_LOCALID"),
        address=first_host(environ.get("SLURM_STEP_NODELIST", "")) or None,
        port=_derived_port(f"Slurm {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"),
        source="Slurm (SLURM_STEP_NUM_TASKS)",
    )


def _tasks_per_node(text: str) -> list[int]:
    """The numbers in Slurm's ``2(x3),1``, which is three nodes of two tasks and one of one."""
    tasks: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        nodes = int(match[2] or 1) if match is not None else 0
        if match is None or len(tasks) + nodes > _MOST_NODES:
            raise InvalidArgument(
                f"environment variable SLURM_STEP_TASKS_PER_NODE={shortened(text)}: expected numbers such as 2(x3),1, "
                f"of {_MOST_NODES} nodes at most"
            )
        tasks += [int(match[1])] * nodes
    return tasks


def first_host(nodes: str) -> str:
    """The first name in a list of Slurm's, such as ``gpu[007-010,12],login``; empty for an empty list."""
    match = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes.strip())
    if match is None:
        return ""
    before, numbers, after = match[1], match[2] or "", match[3]
    return before + re.split("[-,]", numbers)[0] + after


def _derived_port(job: str) -> int:
    """A port that all launchers of one job work out alike, and those of other jobs most likely not."""
    return _FIRST_DERIVED_PORT + zlib.crc32(job.encode()) % _DERIVED_PORTS


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if _NUMBER.fullmatch(text) is None:
        raise InvalidArgument(f"environment variable {name}={shortened(text)}: expected a number")
    return int(text)
