"""How a launched function runs: the settings of its workers, and reasons why they cannot be forks of this process."""

from __future__ import annotations

import os
import sys

from accelerate_cpp.config import env_table
from accelerate_cpp.devices.affinity import shares_of_launch
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.fork.first_gpu_use import first_use
from accelerate_cpp.launch.fork.notebook_accelerators import gpu_count, has_tpu, initialised, started_library
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.environment import WorkerGroup, threads_per_worker
from accelerate_cpp.launch.plan.machines import ALONE, Launchers


def processes_of_notebook(num_processes: int | None) -> int:
    """The number of processes that ``notebook_launcher`` starts.

    Args:
        num_processes: ``None`` is one per visible GPU, or 1 without GPUs. In Colab with fewer than two GPUs every
            number means 1: its notebooks request the number of processes of the machine on which they were written.
    """
    gpus = 0 if env_table.USE_CPU.get() else gpu_count(os.environ)
    if num_processes is None:
        return max(1, gpus)
    if "google.colab" in sys.modules and gpus < 2 and num_processes > 1:
        return 1
    return num_processes


def runs_on_tpus(num_processes: int | None) -> bool:
    """Whether the function runs in torch_xla's processes: there is a TPU and no GPU, and not only one is requested."""
    if num_processes == 1 or env_table.USE_CPU.get() or not has_tpu(os.environ):
        return False
    return gpu_count(os.environ) == 0


def function_group(
    num_processes: int,
    *,
    cpu: bool = False,
    mixed_precision: str | None = None,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    launchers: Launchers = ALONE,
) -> WorkerGroup:
    """The settings of a launched function. A ``mixed_precision`` of ``None`` leaves it to the environment.

    Raises:
        InvalidArgument: ``num_processes`` is not a positive integer.
    """
    cpu = cpu or env_table.USE_CPU.get()
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        raise InvalidArgument(f"num_processes={num_processes!r}: expected an integer of at least 1")
    shares = shares_of_launch(num_processes, os.environ, on_gpus=not cpu) if env_table.CPU_AFFINITY.get() else ()
    return WorkerGroup(
        num_processes=num_processes,
        cpu=cpu,
        mixed_precision=mixed_precision or env_table.MIXED_PRECISION.get() or "no",
        num_threads=threads_per_worker(num_processes, None, os.environ, shares),
        master_addr=master_addr,
        master_port=master_port or host_resources.free_port(),
        debug=env_table.DEBUG_MODE.get(),
        fork_launched=True,
        shares=shares,
        launchers=launchers,
    )


def obstacle_to_forks(cpu: bool) -> str | None:
    """Why forks of this process would not work as workers, as a sentence; ``None`` if they would.

    Args:
        cpu: the workers use no GPU.

    Raises:
        InvalidArgument: this process is a member of a group of several, which a launch would not be part of.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise InvalidArgument(
                f"process {os.getpid()} already belongs to a process group of {size}: call the function itself in "
                "processes that a launcher started, or torch.distributed.destroy_process_group() first"
            )
        return "this process has its own process group, and a fork would inherit remains of it"
    library = started_library()
    if library is not None:
        return f"{library} has started its threads in this process, and a fork of it would wait for them for ever"
    kind = None if cpu else initialised()
    if kind is None:
        return None
    call = first_use(kind)
    by = f", by {call}" if call else " (by a call before accelerate_cpp.launchers was imported)"
    return f"{kind} is already initialised in this process{by}, and a fork of it could not use the GPU"
