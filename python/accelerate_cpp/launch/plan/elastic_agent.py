"""Torch's elastic agent instead of our supervisor, for machines that have to agree on which of them take part.

The agent is torch's ``torch.distributed.run``: it meets the agents of other machines in a rendezvous, numbers the
workers, and starts all of them again when one fails anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

from accelerate_cpp.launch.plan.environment import group_environment
from accelerate_cpp.launch.plan.launch_plan import Agent, LaunchPlan
from accelerate_cpp.launch.plan.own_program import module_program
from accelerate_cpp.launch.workers import exec_with_parent as tied
from accelerate_cpp.launch.workers.end_of_input import end_next_program_with_stdin

_RUN = "accelerate-cpp"


def agent_command(plan: LaunchPlan, agent: Agent) -> tuple[str, ...]:
    """The command that runs ``agent`` on this machine."""
    group = plan.group
    options: dict[str, object] = {
        "nnodes": _machines(group.launchers.count, agent.least_machines),
        "nproc_per_node": group.num_processes,
        "rdzv_backend": agent.rdzv_backend,
        "rdzv_endpoint": f"{group.master_addr}:{group.master_port}",
        "rdzv_id": _RUN,
        "max_restarts": agent.max_restarts,
        "monitor_interval": agent.monitor_interval,
        "role": agent.role,
        # Without it, the agent makes a folder and writes nothing into it.
        "tee": "3" if plan.logs.folder is not None and agent.tee == "0" else agent.tee,
    }
    parts = [agent.rdzv_conf] if agent.rdzv_conf else []
    if agent.rdzv_backend == "c10d" and agent.is_host is not None and "is_host=" not in agent.rdzv_conf:
        parts.append(f"is_host={str(agent.is_host).lower()}")
    if parts:
        options["rdzv_conf"] = ",".join(parts)
    if plan.logs.folder is not None:
        options["log_dir"] = str(plan.logs.folder)
    from accelerate_cpp.comm.hosts import address_towards, is_reachable  # here, as few launches have an agent

    # Workers get the address of the agent with rank 0, because the name of its machine may not resolve to it.
    own_address = address_towards(group.master_addr)
    if is_reachable(own_address):
        options["local_addr"] = own_address
    flags = [f"--{name}={value}" for name, value in options.items()]
    # The workers of the agent are tied to it as ours are to us.
    return (*module_program("torch.distributed.run"), *flags, tied.__file__, *plan.command)


def _machines(most: int, least: int | None) -> str:
    return str(most) if least is None else f"{least}:{most}"


def become_agent(plan: LaunchPlan, agent: Agent, environ: Mapping[str, str] | None = None) -> NoReturn:
    """Replaces this process with the agent."""
    if plan.ends_with_stdin:
        end_next_program_with_stdin()
    command = agent_command(plan, agent)
    os.execve(command[0], command, group_environment(plan.group, os.environ if environ is None else environ))
