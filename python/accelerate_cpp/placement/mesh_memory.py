"""What each rank of a mesh holds of a model in training: split, cut and sharded as the strategies do it, without data.

Layers are split by the code that splits them in training, over a process group that carries nothing; activations are
what autograd saves in a pass of each stage on tensors without data.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate_cpp.comm.mesh import Mesh
from accelerate_cpp.devices.shards import local_part
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.models import parts_of
from accelerate_cpp.parallel.costs.parts import Part
from accelerate_cpp.parallel.costs.steps import Step, stages_of
from accelerate_cpp.parallel.pipeline.cut import Cut, cut_model
from accelerate_cpp.parallel.pipeline.decoder import DivisibleDecoder
from accelerate_cpp.parallel.pipeline.schedules import schedule_named
from accelerate_cpp.parallel.tensor.plans import Plan, plan_for
from accelerate_cpp.parallel.tensor.split import split_layers
from accelerate_cpp.parallel.tensor.styles import COLUMNS, GATHERED_COLUMNS
from accelerate_cpp.parallel.tensor.vocabulary import split_cross_entropy
from accelerate_cpp.placement.model_memory import Inputs, activation_bytes, optimizer_bytes

__all__ = ["Held", "held_by_ranks", "kept_activations"]

_CAUSAL = "causal_sdpa"
_WIDE_BYTES = 4
"""Of parameters, gradients and states of optimizers, in mixed precision, too."""


@dataclass(frozen=True)
class Held:
    """What the ranks at one place of the pipeline hold, in bytes; the rank with the most, where shards differ.

    Attributes:
        layers: calls of attention in its stages.
        parameters: elements of its stages, before they are split or sharded.
        weights, gradients, optimizer: of the rank's shard of its part.
        gathered: of shards, the most that are whole at a time: with stages all of the rank's, and their gradients; else
            the root and two units.
        activations: of the micro-batches that the schedule keeps, at most.
    """

    layers: int
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int

    @property
    def together(self) -> int:
        """An upper bound of what these are at a time."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.activations


def held_by_ranks(
    model: nn.Module, mesh: Mesh, step: Step, optimizer: str, dtype: torch.dtype | None, device: str = "cpu"
) -> tuple[list[Part], list[Held]]:
    """The stages of ``model``, and what the ranks at each place along ``pp`` hold.

    Args:
        model: a decoder of Transformers on the meta device, in float32. It is taken apart: do not use it afterwards.
        optimizer: a key of ``OPTIMIZERS``.
        dtype: of mixed precision, that of autocast or of gathered shards; ``None`` for none.
        device: whose kernels save activations.

    Raises:
        InvalidArgument: the model is no decoder, cannot be split or cut over this mesh, or reads values, or its
            communication is not known.
    """
    _require_decoder(model)
    tp, pp = mesh.size("tp"), mesh.size("pp")
    owners = stages_of(mesh, step.schedule)
    plan = plan_for(model, None, tp) if tp > 1 else Plan({})
    cut = cut_model(model, len(owners)) if pp > 1 else None
    modules = [model] if cut is None else cut.stages
    parts = parts_of(model, modules, plan)
    saved = _activations(model, modules, parts, cut, plan, mesh, step, dtype, device)
    kept = kept_activations(step.schedule, pp, step.micro_batches, saved)
    found = []
    for place in range(pp):
        own = [part for part, owner in zip(parts, owners, strict=True) if owner == place]
        found.append(_held(own, kept[place], mesh, step, optimizer))
    return parts, found


def _require_decoder(model: nn.Module) -> None:
    if not DivisibleDecoder.accepts(model) or "use_cache" not in inspect.signature(model.forward).parameters:
        raise InvalidArgument(
            f"estimate-memory --parallelism: {type(model).__name__} is no decoder of transformers (...ForCausalLM), of "
            "which alone it is known what processes hold and send; leave --parallelism out, or choose one with "
            "--model_class AutoModelForCausalLM"
        )


def kept_activations(schedule: str, ranks: int, micro_batches: int, saved: Sequence[int]) -> list[int]:
    """The most bytes of activations that each rank of a pipeline keeps at a time.

    A pass through a stage keeps what it saved until its gradients of weights are computed. Schedules with one stage in
    each rank keep all micro-batches (``gpipe``), or as many as there are ranks from this one on (``1f1b``); of others
    torch's order of operations is followed.

    Args:
        saved: bytes that a pass through each stage saves.
    """
    chosen = schedule_named(schedule)
    if ranks == 1:
        return [saved[0]]
    if chosen.stages_per_rank == 1:
        counts = [micro_batches if schedule == "gpipe" else min(micro_batches, ranks - place) for place in range(ranks)]
        return [count * size for count, size in zip(counts, saved, strict=True)]
    found = []
    with _nobody_else(ranks):
        order = _order(chosen, ranks, micro_batches)
    for place in range(ranks):
        now = most = 0
        for action in order[place]:
            # A schedule may count on more micro-batches than there are.
            if action is None or action.microbatch_index >= micro_batches:
                continue
            kind, size = action.computation_type.name, saved[action.stage_index]
            now += size if kind == "FORWARD" else -size if kind in ("FULL_BACKWARD", "BACKWARD_WEIGHT") else 0
            most = max(most, now)
        found.append(most)
    return found


def _order(schedule: Any, ranks: int, micro_batches: int) -> Mapping[int, Sequence[Any]]:
    """By rank, what it computes one after the other."""
    from torch.distributed.pipelining import PipelineStage

    owners = schedule.ranks_of_stages(ranks)
    passed = (torch.empty(1, device="meta", requires_grad=True),)
    stages = [
        PipelineStage(nn.Identity(), number, len(owners), torch.device("cpu"), input_args=passed, output_args=passed)
        for number, owner in enumerate(owners)
        if owner == 0
    ]
    order: Mapping[int, Sequence[Any]] = schedule.build(stages, micro_batches, lambda *_: None).pipeline_order
    return order


def _held(parts: Sequence[Part], activations: int, mesh: Mesh, step: Step, optimizer: str) -> Held:
    tp, pp = mesh.size("tp"), mesh.size("pp")
    shards = mesh.size("dp_shard") * mesh.size("cp") if step.sharded else 1
    units = [
        sum(weight.elements(tp) for weight in unit)
        for part in parts
        for unit in ([part.weights] if pp > 1 else part.units)
    ]
    own = [weight.padded_shard(tp, shards) for part in parts for weight in part.weights]
    with torch.device("meta"):
        holder = nn.ParameterList(nn.Parameter(torch.empty(elements)) for elements in own)
    gathered = 0
    if shards > 1 and pp > 1:
        gathered = sum(units) * 2 * step.weight_bytes  # and their gradients
    elif shards > 1:
        gathered = (units[-1] + sum(sorted(units[:-1])[-2:])) * step.weight_bytes
    return Held(
        layers=sum(part.attentions for part in parts),
        parameters=sum(weight.elements() for part in parts for weight in part.weights),
        weights=sum(own) * _WIDE_BYTES,
        gradients=(sum(own) + _whole_embeddings(parts, mesh, step)) * _WIDE_BYTES,
        optimizer=optimizer_bytes(holder, optimizer),
        gathered=gathered,
        activations=activations,
    )


def _whole_embeddings(parts: Sequence[Part], mesh: Mesh, step: Step) -> int:
    """Elements of gradients of split embeddings beyond this rank's: without copies and shards, torch's are whole."""
    tp = mesh.size("tp")
    if tp == 1 or step.sharded or mesh.size("dp_replicate") * mesh.size("cp") > 1:
        return 0
    tables = [
        next(weight for weight in part.units[-1] if weight.split == 0 and len(weight.shape) == 2)
        for part in parts
        if part.split_embedding
    ]
    return sum(table.elements() - table.elements(tp) for table in tables)


class _Computing(nn.Module):
    """A stage with the loss, if it is the last one.

    Args:
        cut: of which it is a stage; ``None`` for a whole model, which computes its loss itself.
        group: the processes that compute losses of their parts of the logits together; ``None`` where logits are whole.
    """

    def __init__(self, stage: nn.Module, cut: Cut | None, last: bool, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.stage = stage
        self._cut, self._last, self._group = cut, last, group

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        if self._cut is None and self._group is None:
            return self.stage(input_ids=inputs, labels=targets, use_cache=False).loss
        outputs = self.stage(inputs) if self._cut else self.stage(input_ids=inputs, use_cache=False).logits
        if self._last and self._group is not None:
            return split_cross_entropy(outputs.float().flatten(0, 1), targets.flatten(), self._group)
        if self._cut is None:
            return outputs
        return self._cut.batches.default_loss(outputs, targets, 1.0) if self._last else outputs


def _activations(
    model: nn.Module,
    modules: Sequence[nn.Module],
    parts: Sequence[Part],
    cut: Cut | None,
    plan: Plan,
    mesh: Mesh,
    step: Step,
    dtype: torch.dtype | None,
    device: str,
) -> list[int]:
    """For each stage the bytes that autograd saves of a micro-batch. Equal stages are computed once."""
    tp, tokens = mesh.size("tp"), step.tokens // mesh.size("cp")
    # Torch's splitting of an embedding works on DTensors alone. It saves the same indices.
    # Logits that stay split look whole, which tensors without data cannot: the loss is computed of the parts directly.
    splits_losses = step.loss_parallel and GATHERED_COLUMNS in plan.styles.values()
    styles = {name: style for name, style in plan.styles.items() if style != "embedding_rowwise"}
    if splits_losses:
        styles = {name: COLUMNS if style == GATHERED_COLUMNS else style for name, style in styles.items()}
    computed = Plan(styles, plan.attention)
    known: dict[Part, int] = {}
    found = []
    with _nobody_else(tp) as group, _causal_attention(model):
        for module, part in zip(modules, parts, strict=True):
            if part not in known:
                if computed.styles:
                    _split(module, computed.of_part(module), step, group)
                losses = group.get_group() if splits_losses else None
                computing = _Computing(module, cut, part.last, losses).train(model.training)
                # Shards are gathered in the precision of the pass; other weights are copied into it by autocast.
                cast, gathered = (None, dtype) if step.sharded else (dtype, None)
                inputs = _inputs(part, step.rows, tokens, gathered or torch.float32)
                known[part] = _saved(type(model).__name__, computing, inputs, cast, device, gathered)
            found.append(known[part])
    return found


def _saved(name: str, computing: nn.Module, *options: Any) -> int:
    try:
        return activation_bytes(computing, *options)
    except Exception as error:  # the model's own code, which may read values that do not exist
        text = str(error).strip().splitlines()
        raise InvalidArgument(
            f"estimate-memory --parallelism: a forward pass of {name} without data fails, so the size of its "
            f"activations is unknown ({type(error).__name__}: {text[0] if text else ''}); choose a model whose code "
            "reads no values, as most but mixtures of experts do"
        ) from error


def _inputs(part: Part, rows: int, tokens: int, dtype: torch.dtype) -> Any:
    def make() -> Inputs:
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        given = ids if part.first else torch.empty(rows, tokens, part.hidden, dtype=dtype, requires_grad=True)
        return (given, ids), {}

    return make


def _split(module: nn.Module, plan: Plan, step: Step, mesh: Any) -> None:
    if plan.styles:
        split_layers(module, plan, step.sequence_parallel, mesh, lambda _: None)
    for inner in module.modules():
        for name, weight in inner._parameters.items():
            if weight is not None:
                inner._parameters[name] = nn.Parameter(local_part(weight).detach())


@contextmanager
def _causal_attention(model: nn.Module) -> Iterator[None]:
    """Keeps a model of Transformers from making masks, as it does on tensors without data, which it cannot look at."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    functions: Any = importlib.import_module("transformers").AttentionInterface
    functions.register(_CAUSAL, functions()["sdpa"])  # under a name for which there are no masks
    config._attn_implementation = _CAUSAL
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


@contextmanager
def _nobody_else(size: int) -> Iterator[Any]:
    """A mesh of ``size`` processes of which only this one exists: operations return at once, with what was there."""
    if size == 1:
        yield None
        return
    if dist.is_initialized():
        raise InvalidArgument(
            "estimate-memory --parallelism: this process is in a process group already; run the command by itself"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))["tp"]
    finally:
        dist.destroy_process_group()
