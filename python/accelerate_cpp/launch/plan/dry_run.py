"""A launch plan as text, for ``--dry_run``."""

from __future__ import annotations

import os
import shlex

from accelerate_cpp.config.env_table import render_cores
from accelerate_cpp.launch.plan.elastic_agent import agent_command
from accelerate_cpp.launch.plan.environment import group_environment, worker_environment
from accelerate_cpp.launch.plan.launch_plan import LaunchPlan
from accelerate_cpp.launch.plan.shown_lines import shown


def render(plan: LaunchPlan) -> str:
    """The workers that this launcher would start, their command, and their environment."""
    group, launchers = plan.group, plan.group.launchers
    ranks = f"{group.ranks.start}" if len(group.ranks) == 1 else f"{group.ranks.start} to {group.ranks[-1]}"
    lines = [
        f"launcher {launchers.rank} of {launchers.count} ({launchers.source}): rank {ranks} of {group.world_size}"
        if launchers.count > 1
        else f"{group.world_size} process{'es' if group.world_size > 1 else ''} on this machine",
    ]
    if launchers.count > 1 and plan.deepspeed is None:
        lines.append(f"rank 0 is at {group.master_addr}, port {group.master_port}")
    if plan.elastic is not None:
        lines.append(f"goes on while there are {plan.elastic.least_machines} or more of these launchers")
    if plan.deepspeed is not None:
        lines = [f"on the machines of {plan.deepspeed.hostfile}, by DeepSpeed's launcher:"]
        command, told = plan.deepspeed_command, plan.deepspeed.environment(group)
    elif plan.agent is not None:
        lines.append(f"watched by torch's agent, which meets the others through {plan.agent.rdzv_backend}:")
        command, told = agent_command(plan, plan.agent), group_environment(group, os.environ)
    elif plan.tpus is not None:
        which = "one process" if plan.tpus.alone else "one process for each TPU"
        lines = [f"{which} on this machine, by torch_xla, which calls {plan.tpus.function}() of:"]
        command, told = plan.command, group_environment(group, os.environ)
    else:
        command, told = plan.command, worker_environment(group, 0, -1)
    lines.append(f"command: {shlex.join(command)}")
    lines += [f"  {name}={value}" for name, value in sorted(told.items()) if os.environ.get(name) != value]
    lines += [f"worker {worker} on cores {render_cores(cores)}" for worker, cores in enumerate(group.shares)]
    lines += [f"{name}: {shown(name, one.value)} ({one.source})" for name, one in plan.settings.items()]
    lines.append(f"restarts after a failure: {plan.max_restarts}")
    if plan.logs.folder is not None:
        lines.append(f"output also in {plan.logs.folder}")
    if plan.report is not None:
        lines.append(f"report in {plan.report}")
    return "\n".join(lines)
