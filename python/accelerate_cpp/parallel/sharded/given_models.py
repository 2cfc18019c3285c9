"""Models that the program has sharded before it prepares them: who averages which gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.devices.shards import is_sharded_tensor
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.sharded import version_1
from accelerate_cpp.parallel.sharded.first_values import FirstValues
from accelerate_cpp.parallel.sharded.fully_sharded_units import weights_of


def take_over(model: torch.nn.Module, device: torch.device) -> list[torch.nn.Parameter]:
    """The parameters of ``model`` that each process has as a whole, after these got the values of rank 0. Collective.

    Nothing else is changed.

    Args:
        device: of this process.

    Raises:
        InvalidArgument: a parameter that is trained is shared out over a part of the processes, so that nothing
            averages over the others; or the ranks have different models.
    """
    copies = _copies(model, dist.get_world_size())
    first = FirstValues(model, device, only=copies)
    first.bring(copies, lambda weight: weight.dtype)
    return copies


def processes_per_batch(model: torch.nn.Module) -> int:
    """Over how many processes layers of ``model`` are split, which as a rule compute with the same batches.

    They have equal gradients of what is not split.
    """
    averaged = dict(_averaged_by_units(model))
    layouts = [one for one in model.parameters() if one.requires_grad and is_sharded_tensor(one)]
    return max((_size(one) // averaged.get(id(one), 1) for one in layouts), default=1)


def _copies(model: torch.nn.Module, ranks: int) -> list[torch.nn.Parameter]:
    averaged = dict([*version_1.averaged_in(model), *_averaged_by_units(model)])
    sharing = processes_per_batch(model)
    copies = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if not is_sharded_tensor(weight) and id(weight) not in averaged:
            copies.append(weight)
            continue
        processes = averaged.get(id(weight), 1)
        size = _size(weight) if is_sharded_tensor(weight) else processes
        if ranks not in (size, processes * sharing):
            raise InvalidArgument(
                f"prepare: {name!r} of {type(model).__name__} is shared out over {size} of the {ranks} processes, and "
                f"nothing averages its gradients over the others. Shard it over all {ranks}: fully_shard(model, "
                "mesh=...) with a mesh of two dimensions keeps a copy for each of its rows, and with the other "
                "dimension of the mesh of tensor parallelism it averages over the processes with other batches"
            )
    return copies


def _size(weight: Any) -> int:
    return int(weight.device_mesh.size())


def _averaged_by_units(model: torch.nn.Module) -> Iterator[tuple[int, int]]:
    """The ``id`` of each parameter that ``fully_shard`` averages, and over how many processes."""
    for weight, mesh in weights_of(model):
        yield id(weight.sharded_param), getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
