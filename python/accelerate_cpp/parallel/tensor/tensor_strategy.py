"""Training models whose layers are split over processes, with copies or shards of what each of these has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.devices.shards import is_sharded_tensor
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.sharded.fully_sharded import FullyShardedStrategy
from accelerate_cpp.parallel.sharded.replaced_parameters import places_of
from accelerate_cpp.parallel.sharded.widened_weights import WidenedWeights
from accelerate_cpp.parallel.sharded_models import is_sharded
from accelerate_cpp.parallel.tensor.plans import Plan, is_found_by_shapes, plan_for
from accelerate_cpp.parallel.tensor.split import split_layers
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.plugins.parallelism import TorchTensorParallelConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class TensorParallelStrategy(FullyShardedStrategy):
    """Splits the layers of a model first, then shares out or copies what each process has of it.

    Args:
        device: of this process.
        plugin: how parameters are sharded; ``None`` where the processes with other batches have copies.
        mesh: of the run.
        low_precision: as for :class:`FullyShardedStrategy`.
        options: how layers are split; ``None`` chooses.
    """

    def __init__(
        self,
        device: torch.device,
        plugin: FullyShardedDataParallelPlugin | None,
        mesh: Mesh,
        low_precision: bool,
        options: TorchTensorParallelConfig | None,
    ) -> None:
        super().__init__(device, plugin or FullyShardedDataParallelPlugin(fsdp_version=2), mesh, low_precision)
        self._copies = plugin is None
        self._layers = options or TorchTensorParallelConfig()
        self._root: DeviceMesh | None = None

    @property
    def processes_per_batch(self) -> int:
        """The mesh says which processes get the same batches, so that loaders are prepared for it."""
        return 1

    def _is_taken_over(self, model: torch.nn.Module) -> bool:
        split = _split_over(model)
        if split is None:
            return False
        if split.size() != (self._mesh.size("tp") if split.ndim == 1 else self._mesh.world_size):
            raise InvalidArgument(
                f"prepare: {type(model).__name__} is split over {split.size()} processes, but tp_size is "
                f"{self._mesh.size('tp')} of {self._mesh.world_size}; load it with as many (transformers: "
                "distributed_config=DistributedConfig(tp_size=..., fsdp_size=...)), or as a whole"
            )
        return split.ndim > 1 or self._num_data_ranks == 1

    @property
    def _num_data_ranks(self) -> int:
        return self._mesh.world_size // (self._mesh.size("tp") * self._mesh.size("pp"))

    def _split(self, model: torch.nn.Module) -> None:
        split = _split_over(model)
        if split is not None:  # by the program that loaded it
            self._root = _root_of(split, model)
            return
        self._split_by(model, self._plan_for(model))

    def _plan_for(self, model: torch.nn.Module) -> Plan:
        """That of rank 0 where it is found out by values, which other processes may not have. A collective then."""
        given, size = self._layers.plan, self._mesh.size("tp")
        if not is_found_by_shapes(model, given):
            return plan_for(model, given, size)
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [plan_for(model, given, size)]
            except InvalidArgument as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], InvalidArgument):
            raise found[0]
        plan: Plan = found[0]
        return plan

    def _split_by(self, model: torch.nn.Module, plan: Plan) -> None:
        before, first = places_of(model), self._first_values(model)
        widening = WidenedWeights(model, self._low_precision)
        split_layers(
            model,
            plan,
            self._layers.sequence_parallel,
            self._root_mesh()["tp"],
            lambda tensors: first.bring([one for one in tensors if not is_sharded_tensor(one)], widening.dtype_of),
            self._layers.loss_parallel,
        )
        self._replaced.note(before, places_of(model))
        widening.tell()

    def _shard(
        self, model: torch.nn.Module, units: Sequence[torch.nn.Module], ignored: set[torch.nn.Parameter]
    ) -> None:
        if self._num_data_ranks > 1:
            super()._shard(model, units, ignored)
        else:
            self._bring_the_rest(model)

    def _bring_the_rest(self, model: torch.nn.Module) -> None:
        """Gives what is not split the values of rank 0. Its gradients are the same on all processes."""
        widening = WidenedWeights(model, self._low_precision)
        tensors = [one for one in (*model.parameters(), *model.buffers()) if not is_sharded_tensor(one)]
        self._first_values(model).bring(tensors, widening.dtype_of)
        widening.tell()

    def _share_out(self, unit: torch.nn.Module, options: dict[str, Any]) -> None:
        if not self._copies:
            super()._share_out(unit, options)
            return
        from torch.distributed._composable.replicate_with_fsdp import replicate

        kept = ("mesh", "mp_policy", "offload_policy", "ignored_params")
        replicate(unit, **{name: options[name] for name in kept})

    def _torch_mesh(self) -> DeviceMesh:
        root = self._root_mesh()
        return root[tuple(name for name in root.mesh_dim_names or () if name not in ("pp", "tp"))]

    def _data_axes(self) -> dict[str, int]:
        if not self._copies:
            return super()._data_axes()
        return {"dp_replicate": self._mesh.size("dp_replicate") * self._mesh.size("cp")}

    def _root_mesh(self) -> DeviceMesh:
        if self._root is None:
            stages = {"pp": self._mesh.size("pp")} if self._mesh.size("pp") > 1 else {}
            self._root = self._made_mesh({**stages, **self._data_axes(), "tp": self._mesh.size("tp")})
        return self._root


def _split_over(model: torch.nn.Module) -> DeviceMesh | None:
    """The mesh of a parameter of ``model`` that the program has split; ``None`` if there is none."""
    if not is_sharded(model):
        return None
    found: Any = next((one for one in model.parameters() if is_sharded_tensor(one)), None)
    return None if found is None else found.device_mesh


def _root_of(mesh: DeviceMesh, model: torch.nn.Module) -> DeviceMesh:
    root: DeviceMesh = mesh._get_root_mesh()
    if root.ndim == 1:
        raise InvalidArgument(
            f"prepare: {type(model).__name__} is split over a mesh of its own, which does not say which processes have "
            "copies or shards of its parts; load it with device_mesh=accelerator.torch_device_mesh['tp']"
        )
    return root
