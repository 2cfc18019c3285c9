"""The plan of a rehearsal: a launch of the same script only on the CPUs of this machine, with fewer processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from accelerate_cpp.config import env_table
from accelerate_cpp.config import file as config_file
from accelerate_cpp.config.plugin_variables import MEGATRON, PARALLELISM
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan import host_resources
from accelerate_cpp.launch.plan.environment import WorkerGroup
from accelerate_cpp.launch.plan.launch_plan import LaunchOptions, LaunchPlan, resolve
from accelerate_cpp.launch.plan.settings import DEFAULT, Setting, resolved

PROCESSES = 2  # enough for errors between processes
MOST_OF_A_MESH = 16


@dataclass(frozen=True)
class Rehearsal:
    """A launch that imitates another one on this machine.

    Attributes:
        plan: of the launch that takes place.
        settings: the settings of the launch that it imitates.
        configured: processes of that one; as many as take place where nothing says.
    """

    plan: LaunchPlan
    settings: Mapping[str, Setting]
    configured: int

    def crowd(self) -> str:
        """Says which processes would have to share a device or a core on machines like this one; else empty."""
        setting = self.settings["num_processes"]
        machines = self.settings["num_machines"].value
        gpus, cores = host_resources.gpu_count(), len(os.sched_getaffinity(0))
        if setting.source == DEFAULT:
            return ""
        said = f"{self.configured} processes ({setting.source})"
        if gpus and not self.settings["cpu"].value:
            return f"{said} on {gpus} GPUs of each machine like this" if self.configured > gpus * machines else ""
        if self.settings["cpu"].value and self.configured > cores * machines:
            return f"{said} on {cores} cores of each machine like this"
        return ""


def rehearse(options: LaunchOptions, environ: Mapping[str, str] | None = None) -> Rehearsal:
    """The rehearsal of the launch by ``options``: with at most :data:`PROCESSES`, or as many as its mesh needs, unless
    a flag says how many.

    Raises:
        InvalidArgument: the imitated launch would also be refused, or its mesh needs more than
            :data:`MOST_OF_A_MESH` processes.
    """
    environ = os.environ if environ is None else environ
    settings = resolved(options, environ, config_file.find(options.config_file, environ))
    asked = settings["num_processes"].value
    configured = PROCESSES if asked is None or asked < 1 else int(asked)
    here = replace(
        options,
        num_processes=options.num_processes or min(configured, PROCESSES),
        num_machines=1,
        machine_rank=0,
        main_process_ip="127.0.0.1",
        rdzv_backend="static",
        cpu=True,
        multi_gpu=False,
        tpu=False,
        downcast_bf16=False,
        gpu_ids=None,
    )
    plan = resolve(here, environ)
    needed = _processes_of_mesh(plan.group, environ)
    if options.num_processes is None and needed > plan.group.num_processes:
        if needed > MOST_OF_A_MESH:
            raise InvalidArgument(
                f"the mesh needs {needed} processes, and a check starts {MOST_OF_A_MESH} at most; check smaller sizes, "
                "by flags such as --parallelism_config_tp_size, or pass --num_processes"
            )
        plan = resolve(replace(here, num_processes=needed), environ)
    return Rehearsal(plan, settings, configured)


def _processes_of_mesh(group: WorkerGroup, environ: Mapping[str, str]) -> int:
    """The smallest number of processes over which models can be split as the launch says."""
    degrees = []
    if group.sharding.get(env_table.USE_PARALLELISM_CONFIG):
        degrees = [variable for name, variable in PARALLELISM.items() if name.endswith("_size")]
    elif group.sharding.get(env_table.USE_MEGATRON_LM):
        degrees = [MEGATRON["tp_degree"], MEGATRON["pp_degree"]]
    return prod(int(group.sharding.get(variable, variable.get(environ)) or 1) for variable in degrees)
