"""What each rank of a mesh holds, and which axes of it leave a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate_cpp.check.journal import Finding, Record, of_kind
from accelerate_cpp.check.observed import Observed
from accelerate_cpp.check.task import Task
from accelerate_cpp.comm.mesh import AXES, Mesh
from accelerate_cpp.parallel.costs.links import crosses_hosts
from accelerate_cpp.placement.memory_report import size

_SHARED_OUT = ("pp", "dp_shard", "cp", "sp", "tp")
"""Axes along which ranks have different things; along others all have the same."""


def write_down_mesh(observed: Observed) -> None:
    """Notes what this rank holds, if the ranks of the run share something out: bytes of parts, not of wholes."""
    import torch  # here, as the command that reads the notes works with a torch that cannot be imported, too

    for accelerator in observed.accelerators[-1:]:
        mesh = accelerator._session.topology.mesh
        if any(mesh.size(axis) > 1 for axis in _SHARED_OUT):
            weights = [one for model in accelerator._models for one in model.parameters()]
            states = [
                value
                for optimizer in accelerator._optimizers
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ]
            observed.journal.write("mesh", sizes=dict(mesh.sizes), weights=_bytes(weights), states=_bytes(states))


def _bytes(tensors: Sequence[Any]) -> int:
    from accelerate_cpp.devices.shards import local_part

    different = {id(tensor): tensor for tensor in tensors}.values()
    return sum(local_part(tensor).nbytes for tensor in different)


def judge_mesh(task: Task, journals: Mapping[int, Sequence[Record]]) -> list[Finding]:
    """A note on the mesh, if all ranks wrote down the same."""
    records = {rank: found[-1] for rank, one in journals.items() if (found := of_kind(one, "mesh"))}
    sizes = [record["sizes"] for record in records.values()]
    if len(records) < task.processes or any(one != sizes[0] for one in sizes):
        return []
    mesh = Mesh(0, sizes[0])
    axes = [axis for axis in AXES if mesh.size(axis) > 1]
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for rank, record in records.items():
        ranks_of.setdefault((record["weights"], record["states"]), []).append(rank)
    held = [
        f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}: {size(weights)} of weights and "
        f"{size(states)} of optimizer states"
        for (weights, states), ranks in ranks_of.items()
    ]
    shown = " x ".join(f"{axis} {mesh.size(axis)}" for axis in axes)
    what = f"the mesh is {shown}. {'; '.join(held)}. {_hosts(task, mesh, axes)}"
    return [
        Finding("note", "mesh-layout", what, "", "accelerate-cpp estimate-memory --parallelism says what each sends")
    ]


def _hosts(task: Task, mesh: Mesh, axes: Sequence[str]) -> str:
    machines = int(task.settings.get("num_machines", (1, ""))[0] or 1)
    if machines == 1:
        return "All ranks are on one host"
    per_host = max(1, task.configured // machines)
    between = [axis for axis in axes if crosses_hosts(mesh, (axis,), per_host)]
    within = [axis for axis in axes if axis not in between]
    parts = [f"along {', '.join(between)} ranks communicate between hosts"] if between else []
    parts += [f"along {', '.join(within)} within a host"] if within else []
    each = f"{per_host} rank{'' if per_host == 1 else 's'} each"
    return f"On {machines} machines with {each}, {', '.join(parts)}"
