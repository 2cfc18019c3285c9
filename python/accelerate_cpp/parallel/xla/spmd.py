"""Sharing out parameters and batches over the devices of one process, which torch_xla calls SPMD.

It is what torch_xla's ``SpmdFullyShardedDataParallel`` (FSDPv2) does, as notes on the tensors and modules of a model
instead of a wrapper around it: names in checkpoints, and the class of the model, stay as they are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from accelerate_cpp.devices.tree import leaves_of
from accelerate_cpp.devices.xla import xla_module
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.sharded.units import policy_for, units_of
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin

AXIS = "fsdp"


def is_on() -> bool:
    """Whether one process computes on all its devices: the program has called ``torch_xla.runtime.use_spmd``."""
    return bool(xla_module("runtime").is_spmd())


def mesh() -> Any:
    """torch_xla's global mesh, without axes of one device beside ``"fsdp"``. If the program has made none, all devices
    are along that axis, and the mesh is the one that transformers makes, too.

    Raises:
        InvalidArgument: the program has made a mesh without that axis.
    """
    sharding, runtime = xla_module("distributed.spmd"), xla_module("runtime")
    found = sharding.get_global_mesh()
    if found is None:
        devices = int(runtime.global_runtime_device_count())
        found = sharding.Mesh(np.arange(devices), (devices, 1), (AXIS, "tensor"))
        sharding.set_global_mesh(found)
    if AXIS not in found.axis_names:
        raise InvalidArgument(
            f"fsdp_plugin: the global mesh of torch_xla has the axes {', '.join(found.axis_names)}, but none called "
            f"{AXIS!r}, over which parameters and batches are shared out; name one so, or set no mesh"
        )
    sizes = dict(zip(found.axis_names, found.mesh_shape, strict=True))
    if all(size == 1 for name, size in sizes.items() if name != AXIS):
        # Of a tensor with fewer dimensions than the mesh, torch_xla does not find the parts for each device.
        return sharding.Mesh(found.device_ids, (sizes[AXIS],), (AXIS,))
    return found


def share_out(model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> None:
    """Shares out each parameter of ``model``, along its longest dimension, and the outputs of its units by rows.

    Parameters that the program has shared out itself stay as they are.
    """
    whole = mesh()
    library, sharding = xla_module(""), xla_module("distributed.spmd.xla_sharding")
    for parameter in model.parameters():
        if parameter.ndim > 0 and not library._XLAC._get_xla_sharding_spec(parameter):
            longest = max(range(parameter.ndim), key=lambda dim: parameter.shape[dim])
            sharding.mark_sharding(parameter, whole, _along(longest, parameter.ndim))
    units = units_of(model, policy_for(plugin, model), ())
    for unit in units:
        # Else the compiler would join the backward passes of units, and keep the gradients of all of them at once.
        sharding.apply_backward_optimization_barrier(unit)
    for unit in (*units, model):
        unit.register_forward_hook(_share_out_rows)


def _share_out_rows(module: torch.nn.Module, args: Any, output: Any) -> None:
    """The rows of a unit's outputs stay where those of its inputs are, which lets the compiler gather parameters."""
    sharding, whole = xla_module("distributed.spmd.xla_sharding"), mesh()
    for leaf in leaves_of(output):
        if isinstance(leaf, torch.Tensor) and leaf.ndim > 0 and leaf.device.type == "xla":
            sharding.mark_sharding(leaf, whole, _along(0, leaf.ndim))


def _along(dim: int, ndim: int) -> tuple[str | None, ...]:
    return tuple(AXIS if index == dim else None for index in range(ndim))


class RowsOfBatches:
    """How torch_xla's loader shares out the tensors of a batch: by their first dimension, whatever the others are.

    Args:
        whole: the mesh.
    """

    minibatch = False
    """Each process has whole batches, not only the rows of its devices."""

    def __init__(self, whole: Any) -> None:
        self._mesh = whole

    def can_apply(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has rows, and no fewer dimensions than the mesh."""
        return tensor.ndim >= max(1, len(self._mesh.axis_names))

    def xla_spec(self, tensor: torch.Tensor) -> Any:
        """torch_xla's own specification for ``tensor``; ``None`` for one that all devices get as a whole."""
        if not self.can_apply(tensor):
            return None
        sharding = xla_module("distributed.spmd")
        return sharding.ShardingSpec(self._mesh, _along(0, tensor.ndim)).xla_spec(tensor)
