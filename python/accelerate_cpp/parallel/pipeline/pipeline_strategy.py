"""Training models in stages, whose layers may be split, with copies or shards of what each process has."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.devices.shards import is_sharded_tensor
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.pipeline import Pipeline
from accelerate_cpp.parallel.sharded.clipping import clip_shards
from accelerate_cpp.parallel.sharded.first_values import FirstValues, KnownValues
from accelerate_cpp.parallel.sharded.replaced_parameters import places_of
from accelerate_cpp.parallel.sharded.units import ignored_parameters, policy_for, units_of
from accelerate_cpp.parallel.sharded_models import is_sharded
from accelerate_cpp.parallel.strategy import Layout, ModelSteps
from accelerate_cpp.parallel.tensor.plans import Plan
from accelerate_cpp.parallel.tensor.tensor_strategy import TensorParallelStrategy
from accelerate_cpp.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate_cpp.plugins.parallelism import PipelineParallelConfig, TorchTensorParallelConfig


class PipelineStrategy(TensorParallelStrategy):
    """Cuts a model into stages first; each process prepares its own as :class:`TensorParallelStrategy` does.

    Args:
        device: of this process.
        plugin: how parameters are sharded; ``None`` where the processes with other batches have copies.
        mesh: of the run.
        low_precision: as for :class:`TensorParallelStrategy`.
        layers: how layers are split; ``None`` chooses.
        options: how models are cut, and in which order stages compute.
    """

    def __init__(
        self,
        device: torch.device,
        plugin: FullyShardedDataParallelPlugin | None,
        mesh: Mesh,
        low_precision: bool,
        layers: TorchTensorParallelConfig | None,
        options: PipelineParallelConfig,
    ) -> None:
        super().__init__(device, plugin, mesh, low_precision, layers)
        self._stage_options = options
        self._pipelines: weakref.WeakSet[Pipeline] = weakref.WeakSet()
        self._without_values: set[int] = set()

    @property
    def trains_batches(self) -> bool:
        return True

    @property
    def can_join(self) -> bool:
        return False

    @property
    def layout(self) -> Layout:
        """One file would need the states of all stages on one process."""
        return "shards"

    def _stages_group(self) -> dist.ProcessGroup:
        return self._root_mesh().get_group("pp")

    def _prepare(self, model: torch.nn.Module, steps: ModelSteps) -> torch.nn.Module:
        if is_sharded(model):
            raise InvalidArgument(
                f"prepare: {type(model).__name__} is in shards already, and cannot be cut into the "
                f"{self._mesh.size('pp')} stages of pp_size; prepare it as a whole"
            )
        if steps.dynamo is not None:
            raise InvalidArgument(
                "prepare: a model in stages is not compiled, as each micro-batch passes through code that changes it; "
                "leave dynamo_backend or dynamo_plugin out, or pp_size"
            )
        plan = self._plan_for(model) if self._mesh.size("tp") > 1 else Plan({})
        first = FirstValues(model, self._device)
        tensors = [*model.parameters(), *model.buffers()]
        pipeline = Pipeline.of(model, self._stages_group(), self._stage_options)
        own = {id(one) for one in pipeline.parameters()}
        self._replaced.leave_to_others(one for one in model.parameters() if id(one) not in own)
        before = places_of(pipeline)
        first.bring_to(pipeline.stage_modules, tensors)
        self._replaced.note(before, places_of(pipeline))
        self._without_values = {
            id(one) for one in (*pipeline.parameters(), *pipeline.buffers()) if first.has_no_values(one)
        }
        for stage in pipeline.stage_modules:
            self._prepare_stage(stage, plan.of_part(stage), steps)
        self._pipelines.add(pipeline)
        self._distribute(pipeline)
        first_names = pipeline.names_of_copies
        self._held[pipeline] = [(first_names.get(name, name), one) for name, one in pipeline.named_parameters()]
        return pipeline

    def _prepare_stage(self, stage: torch.nn.Module, plan: Plan, steps: ModelSteps) -> None:
        plugin = self._plugin
        if plugin.ignored_modules is not None:
            raise InvalidArgument(
                "FullyShardedDataParallelPlugin: ignored_modules with pp_size; the processes that have a stage average "
                "all of its gradients. Leave it out"
            )
        if plan.styles:
            self._split_by(stage, plan)
        steps.cast(stage)
        policy, ignored = policy_for(plugin, stage), ignored_parameters(plugin, stage, self._device)
        self._checkpoint(stage, policy, ignored)
        self._shard(stage, units_of(stage, policy, ignored), ignored)

    def _first_values(self, model: torch.nn.Module) -> FirstValues:
        return KnownValues(model, self._device, self._without_values)

    def _bring_the_rest(self, model: torch.nn.Module) -> None:
        """The stages have all of their values already."""

    def _options(self) -> dict[str, Any]:
        """Stages keep what they have gathered from one micro-batch to the next."""
        return {**super()._options(), "reshard_after_forward": False}

    def train_batch(self, model: torch.nn.Module, inputs: Any, **options: Any) -> torch.Tensor:
        return self._pipeline(model).train_batch(inputs, **options)

    def eval_batch(self, model: torch.nn.Module, inputs: Any, **options: Any) -> Any:
        return self._pipeline(model).eval_batch(inputs, **options)

    def _pipeline(self, model: torch.nn.Module) -> Pipeline:
        inner = self.unwrap(model)
        if not isinstance(inner, Pipeline):
            raise InvalidArgument(
                f"train_batch: {type(inner).__name__} has not been prepared; pass it to prepare first"
            )
        return inner

    def clip_grad_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float,
        measured: Mapping[int, tuple[float | torch.Tensor, float | torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        elsewhere = [pipeline.get_parameter(name) for pipeline in self._pipelines for name in pipeline.copies]
        copies = set(map(id, self.as_stepped(elsewhere)))
        given = self.as_stepped(parameters)
        return clip_shards(given, max_norm, norm_type, measured, None, self._stages_group(), copies)

    def model_state(self, model: torch.nn.Module, here: bool = True) -> dict[str, torch.Tensor]:
        """On the CPU of rank 0, to which each stage sends its tensors one by one; or empty unless ``here``."""
        whole: dict[str, torch.Tensor] = {}
        group = self._stages_group()  # on all ranks, as the first call makes the groups of the mesh
        for name, value in self.local_state(model).items():
            gathered = value.full_tensor() if is_sharded_tensor(value) else value
            if self._is_first_of_stage:
                whole[name] = gathered.cpu() if isinstance(gathered, torch.Tensor) else gathered
        if not self._is_first_of_stage:
            return {}
        found = self._brought_together(whole, group)
        inner = self.unwrap(model)
        for name, first in inner.names_of_copies.items() if isinstance(inner, Pipeline) else ():
            if name in found and first in found:
                found[name] = found[first]  # one tensor, as in the whole model
        return found if here else {}

    def names_elsewhere(self, model: torch.nn.Module) -> frozenset[str]:
        return model.names_elsewhere if isinstance(model, Pipeline) else frozenset()

    def names_everywhere(self, groups: Sequence[Sequence[str]]) -> list[list[str]]:
        group = self._stages_group()
        everyones: list[Any] = [None] * group.size()
        dist.all_gather_object(everyones, [list(names) for names in groups], group=group)
        return [list(dict.fromkeys(name for names in own for name in names)) for own in zip(*everyones, strict=True)]

    @property
    def _writes_copies(self) -> bool:
        return self._is_first_of_stage

    @property
    def _is_first_of_stage(self) -> bool:
        return self._mesh.rank % (self._mesh.world_size // self._mesh.size("pp")) == 0

    def _brought_together(self, own: dict[str, torch.Tensor], group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        """On rank 0, the states of all stages. Called by the first process of each.

        Not in the group of all ranks: Gloo counts messages as if they were collectives, which a meeting
        (:mod:`accelerate_cpp.comm.whereabouts`) takes to be as many on all ranks.
        """
        width = self._mesh.world_size // self._mesh.size("pp")
        if dist.get_rank() > 0:
            shapes = [(name, value.shape, value.dtype) for name, value in own.items()]
            dist.send_object_list([shapes], dst=0, group=group)
            for value in own.values():
                dist.send(value.to(self._device).contiguous(), dst=0, group=group)
            return {}
        for source in range(width, self._mesh.world_size, width):
            said: list[Any] = [None]
            dist.recv_object_list(said, src=source, group=group)
            for name, shape, dtype in said[0]:
                value = torch.empty(shape, dtype=dtype, device=self._device)
                dist.recv(value, src=source, group=group)
                own.setdefault(name, value.cpu())
        return own
