"""Sharding by torch's ``fully_shard`` (FSDP2): units are gathered before they compute, and freed afterwards.

Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (arXiv:2304.11277).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from accelerate_cpp.comm.host_group import HostGroup
from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.comm.timeouts import that_of_all
from accelerate_cpp.devices.host_memory import return_free_memory
from accelerate_cpp.devices.shards import empty_like, is_sharded_tensor
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.bundle import Bundle
from accelerate_cpp.parallel.compilation import interpreted
from accelerate_cpp.parallel.sharded.first_values import FirstValues
from accelerate_cpp.parallel.sharded.fully_sharded_units import units_in
from accelerate_cpp.parallel.sharded.kept_buffers import keep_buffers
from accelerate_cpp.parallel.sharded.local_steps import has_mixtures, stepping_on_local_parts
from accelerate_cpp.parallel.sharded.replaced_parameters import ReplacedParameters, places_of
from accelerate_cpp.parallel.sharded.sharded_strategy import ShardedStrategy
from accelerate_cpp.parallel.sharded.units import (
    checkpoint_activations,
    ignored_parameters,
    policy_for,
    units_of,
)
from accelerate_cpp.parallel.sharded.widened_weights import WidenedWeights
from accelerate_cpp.parallel.sharded_models import is_sharded
from accelerate_cpp.parallel.strategy import Layout, ModelSteps
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate_cpp.parallel.sharded.host_weights import HostWeights


def _publishing(weights: HostWeights) -> Callable[..., None]:
    @interpreted(recursive=True)
    def publish(*_: Any) -> None:
        weights.publish_changes()

    return publish


class FullyShardedStrategy(ShardedStrategy):
    """Shards models that are not in shards already.

    Args:
        device: of this process.
        plugin: what the user asked for; read whenever a model is prepared.
        mesh: of the run.
        low_precision: whether forward passes compute in less than fp32, so that what the optimizer steps on has to be
            wider than what is computed with.
    """

    def __init__(
        self, device: torch.device, plugin: FullyShardedDataParallelPlugin, mesh: Mesh, low_precision: bool
    ) -> None:
        super().__init__(device)
        self._given = plugin
        self._mesh = mesh
        self._low_precision = low_precision
        self._replaced = ReplacedParameters()
        self._device_mesh: DeviceMesh | None = None
        self._host: HostGroup | None = None
        self._host_weights: list[weakref.ref[HostWeights]] = []  # as prepared; the units keep them
        self._hooked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def prepare(self, bundle: Bundle, steps: Sequence[ModelSteps] | None = None) -> Bundle:
        for optimizer in bundle.optimizers:
            self.prepare_optimizer(optimizer)
        return super().prepare(bundle, steps)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        self._replaced.follow([optimizer])
        if self._has_host_weights and optimizer not in self._hooked:
            self._hooked.add(optimizer)
            optimizer.register_step_pre_hook(lambda stepping, *_: self._before_step(stepping))
            optimizer.register_step_post_hook(lambda stepping, *_: self._after_step(stepping))
            for mode in ("train", "eval"):
                self._order_changes(optimizer, mode)
        return optimizer

    def _stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        # On accelerators torch steps on all parameters at once, but not on a mixture of those in shards and others.
        if self._device.type != "cpu" and not has_mixtures(optimizer):
            return super()._stepping(optimizer)
        return stepping_on_local_parts(optimizer, num_own_hooks=2 if optimizer in self._hooked else 0)

    @property
    def _plugin(self) -> FullyShardedDataParallelPlugin:
        """What the user asks for by now, in the words of version 2."""
        return self._given.in_version_2()

    @property
    def _has_host_weights(self) -> bool:
        return bool(self._plugin.weights_once_per_host)

    def _weights_of(self, parameters: Iterable[Any]) -> list[HostWeights]:
        """Those of which ``parameters`` are shards, in the order in which all processes prepared them."""
        found = list(parameters)
        living = [weights for weights in (reference() for reference in self._host_weights) if weights is not None]
        return [weights for weights in living if weights.hold_any_of(found)]

    def _order_changes(self, optimizer: torch.optim.Optimizer, mode: str) -> None:
        """Schedule-free optimizers change weights when they change their mode; others have no modes."""
        change = getattr(optimizer, mode, None)
        if change is None:
            return

        @functools.wraps(change)
        def in_order(*args: Any, **kwargs: Any) -> Any:
            self._before_step(optimizer)
            result = change(*args, **kwargs)
            self._after_step(optimizer)
            return result

        setattr(optimizer, mode, in_order)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for weights in self._weights_of(one for group in optimizer.param_groups for one in group["params"]):
            weights.await_readers()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        for weights in self._weights_of(one for group in optimizer.param_groups for one in group["params"]):
            weights.publish()

    def _prepare(self, model: torch.nn.Module, steps: ModelSteps) -> torch.nn.Module:
        """Nothing is placed: units are moved to the device one by one, when they are sharded."""
        if self._is_taken_over(model):
            return super()._prepare(model, steps)
        self._split(model)
        model = steps.cast(model)
        plugin = self._plugin
        policy = policy_for(plugin, model)
        ignored = ignored_parameters(plugin, model, self._device)
        self._checkpoint(model, policy, ignored)
        model = steps.compile_regions(model)
        self._shard(model, units_of(model, policy, ignored), ignored)
        return_free_memory()  # what the process had of the model is not needed any more
        return steps.compile(self._distribute(model))

    def _checkpoint(self, model: torch.nn.Module, policy: Any, ignored: set[torch.nn.Parameter]) -> None:
        if self._plugin.activation_checkpointing:
            checkpoint_activations(model, policy, ignored, bool(self._plugin.activation_checkpointing_offload))

    def _first_values(self, model: torch.nn.Module) -> FirstValues:
        return FirstValues(model, self._device)

    def _is_taken_over(self, model: torch.nn.Module) -> bool:
        """Whether the program has sharded ``model``, so that nothing is left to share out."""
        return is_sharded(model)

    def _split(self, model: torch.nn.Module) -> None:
        """Splits layers of ``model``, where processes do."""

    def _shard(
        self, model: torch.nn.Module, units: Sequence[torch.nn.Module], ignored: set[torch.nn.Parameter]
    ) -> None:
        first = self._first_values(model)
        options = self._options()
        options["ignored_params"] = ignored
        # In the order of the model, which is the same on all ranks.
        self._ignored[model] = [one for one in model.parameters() if one in ignored and one.requires_grad]
        taken: set[int] = set()
        widening = WidenedWeights(model, self._low_precision)
        for unit in [*units, model]:
            before = places_of(unit)
            tensors = [one for one in (*unit.parameters(), *unit.buffers()) if id(one) not in taken]
            first.bring([one for one in tensors if not is_sharded_tensor(one)], widening.dtype_of)
            root = {} if unit is not model else {"reshard_after_forward": None}  # torch keeps those of the root
            self._share_out(unit, {**options, **root})
            self._replaced.note(before, places_of(unit))
            taken |= {id(one) for one in (*unit.parameters(), *unit.buffers())}
        if self._device.type == "cpu":
            keep_buffers([*units, model], self._torch_mesh().get_group(-1))
        self._share_on_host(model)
        widening.tell()

    def _share_out(self, unit: torch.nn.Module, options: dict[str, Any]) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(unit, **options)

    def _share_on_host(self, model: torch.nn.Module) -> None:
        """Puts the weights of ``model`` once per host, if that is asked for and they have values."""
        if not self._has_host_weights:
            return
        if self._device.type != "cpu":
            raise InvalidArgument(
                f"FullyShardedDataParallelPlugin: weights_once_per_host=True on {self._device}; only processes that "
                "compute on CPUs have their memory in common. Leave it out"
            )
        if any(weight.is_meta for weight in model.parameters()):
            return  # a checkpoint brings the values
        from accelerate_cpp.parallel.sharded.gathered_once import share_units

        policy: Any = self._plugin.mixed_precision_policy
        weights = share_units(units_in(model), self._host_group(), policy and policy.param_dtype)
        self._host_weights.append(weakref.ref(weights, self._host_weights.remove))
        model.register_forward_pre_hook(_publishing(weights), prepend=True)

    def _host_group(self) -> HostGroup:
        if self._host is None:
            self._host = HostGroup(self._torch_mesh().get_group("dp_shard"))
        return self._host

    def _options(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

        plugin: Any = self._plugin
        offload = plugin.cpu_offload
        if self._device.type == "cpu" and isinstance(offload, CPUOffloadPolicy):
            offload = OffloadPolicy()  # shards are in the memory of the host already
        return {
            "mesh": self._torch_mesh(),
            "reshard_after_forward": plugin.reshard_after_forward,
            "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "offload_policy": offload,
        }

    def _torch_mesh(self) -> DeviceMesh:
        """Of the processes that share out parameters in its last dimension, and that have copies of them in another."""
        if self._device_mesh is None:
            self._device_mesh = self._made_mesh(self._data_axes())
        return self._device_mesh

    def _data_axes(self) -> dict[str, int]:
        """Processes that split sequences share out parameters, too."""
        shards = {"dp_shard": self._mesh.size("dp_shard") * self._mesh.size("cp")}
        copies = self._mesh.size("dp_replicate")
        return {"dp_replicate": copies, **shards} if copies > 1 else shards

    def _made_mesh(self, axes: Mapping[str, int]) -> DeviceMesh:
        from torch.distributed.device_mesh import init_device_mesh

        with that_of_all():
            return init_device_mesh(self._device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def dtypes_on_the_way(
        self, model: torch.nn.Module, parameter: torch.nn.Parameter
    ) -> tuple[torch.dtype | None, torch.dtype | None]:
        policy: Any = self._plugin.mixed_precision_policy
        if not is_sharded_tensor(parameter):
            return None, parameter.dtype if parameter.requires_grad else None
        gathered = (policy and policy.param_dtype) or parameter.dtype
        reduced = (policy and policy.reduce_dtype) or gathered
        return gathered, reduced if parameter.requires_grad else None

    @property
    def layout(self) -> Layout:
        from torch.distributed.fsdp import StateDictType

        return "whole" if self._plugin.state_dict_type == StateDictType.FULL_STATE_DICT else "shards"

    def restore_model(self, model: torch.nn.Module, state: Mapping[str, Any], **kwargs: Any) -> None:
        self._free_gathered(model)
        self._materialise(model)
        shared = self._weights_of(model.parameters())
        for weights in shared:
            weights.await_readers()
        super().restore_model(model, state, **kwargs)
        for weights in shared:
            weights.publish()

    def _materialise(self, model: torch.nn.Module) -> None:
        """Gives parameters on the meta device memory, before a checkpoint is loaded into them."""
        before = places_of(model)
        made: dict[int, torch.nn.Parameter] = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is None or not weight.is_meta:
                    continue
                if id(weight) not in made:
                    memory = empty_like(weight, weight.dtype, self._device) if is_sharded_tensor(weight) else None
                    plain = torch.empty_like(weight, device=self._device) if memory is None else memory
                    made[id(weight)] = torch.nn.Parameter(plain, requires_grad=weight.requires_grad)
                module._parameters[name] = made[id(weight)]
        if made:
            self._replaced.note(before, places_of(model))
            self._held[model] = list(model.named_parameters())
            self._share_on_host(model)
