"""What the processes with other batches, or other parts of sequences, have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DataGroup", "share_of_sequences"]


class DataGroup:
    """The processes whose losses are averaged: those with other batches and, of split sequences, with other tokens.

    Args:
        mesh: of the run; ``None`` if all processes have other batches.
        processes: of the run.
    """

    def __init__(self, mesh: DeviceMesh | None, processes: int) -> None:
        names = () if mesh is None else tuple(mesh.mesh_dim_names or ())
        axes = [name for name in ("dp_replicate", "dp_shard", "cp") if name in names]
        self.group: Any = None if mesh is None or not axes else mesh["dp_cp"].get_group()
        self.copies: Any = None if not set(axes) - {"cp"} or mesh is None else mesh["dp"].get_group()
        self.alone = processes == 1 or (mesh is not None and not axes)
        self._processes = processes

    @property
    def size(self) -> int:
        return 1 if self.alone else self._processes if self.group is None else dist.get_world_size(self.group)

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the processes. Collective, in place."""
        if not self.alone:
            dist.all_reduce(values, group=self.group)
        return values

    def averaged(self, values: Tensor) -> Tensor:
        return self.summed(values) / self.size


def share_of_sequences(run: Any) -> Callable[[Tensor], Tensor] | None:
    """A function from tensors of shape (rows, tokens) to the tokens of this process; ``None`` if sequences are whole.

    Args:
        run: the ``Accelerator``.
    """
    mesh, config = run.torch_device_mesh, run.parallelism_config
    if mesh is None or config is None or not config.cp_enabled:
        return None
    from accelerate_cpp.parallel.context.context import ContextParallel

    sequences = ContextParallel(mesh["cp"].get_group(), config.cp_handler.cp_comm_strategy).sequences
    return lambda whole: sequences.share(whole, 1)
