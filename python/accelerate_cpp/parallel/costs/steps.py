"""The operations of an optimizer step on a mesh, rank by rank, as our strategies do them.

Per micro-batch of r rows and s tokens here, with h features and e bytes each, a = r·s·h·e:

===============================  =================================================================================
tensor parallel                  all-reduces of a: one per row layer (forwards), one per column layer (backwards), one
                                 for a split embedding (forwards), one for a split head (backwards); an all-gather of
                                 the logits of this rank, or with ``loss_parallel`` two all-reduces of three numbers
                                 for each token
with sequence parallelism        row layers: a reduce-scatter of a (forwards) and an all-gather of a/n (backwards);
                                 blocks: an all-gather of a/n (forwards); two more for the ends of the region; each
                                 norm: an all-reduce of its gradient
context, ``allgather``           two all-gathers of keys and values, a reduce-scatter of the sums of their gradients
context, ``alltoall``            n-1 and n-1 transfers of keys and values around the ring, n of sums
context, ``ulysses``             all-to-alls of queries, keys, values and outputs, forwards and backwards
stages                           activations of a to the next one, gradients of a to the previous one
===============================  =================================================================================

Per step: gradients of copies (in one all-reduce per unit, or in buckets), gathered shards and scattered gradients,
the loss of a pipeline, gradients of tied weights, and numbers for clipping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from accelerate_cpp.comm.mesh import AXES, Mesh
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.costs.operations import BUCKET, Operation
from accelerate_cpp.parallel.costs.parts import Part, Weight
from accelerate_cpp.parallel.pipeline.schedules import bubble_fraction, schedule_named

__all__ = ["Step", "buckets_of", "operations_of", "stages_of"]

_NUMBER_BYTES = 8
"""Of norms, float64."""
_LOSS_BYTES = 4
_SLOT_BYTES = 64
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Step:
    """An optimizer step.

    Attributes:
        rows: of a micro-batch, on each process.
        tokens: of a row, on all processes that split sequences together.
        micro_batches: parts of a batch that a pipeline computes in turns; without one, backward passes per step.
        element_bytes: of activations.
        weight_bytes: of parameters on their way, and of their gradients.
        sequence_parallel, loss_parallel: as in ``TorchTensorParallelConfig``.
        attention: of context parallelism, ``cp_comm_strategy``.
        schedule: of the pipeline.
        sharded: whether parameters are in shards over ``dp_shard`` and ``cp``.
        units_in_stages: whether layers are units of their own also within the stages of a pipeline; by default stages
            are units.
        clips: whether gradients are clipped by their norm.

    Raises:
        InvalidArgument: a number is not positive, or something has no such name.
    """

    rows: int
    tokens: int
    micro_batches: int = 1
    element_bytes: int = 4
    weight_bytes: int = 4
    sequence_parallel: bool = False
    loss_parallel: bool = False
    attention: str = "allgather"
    schedule: str = "1f1b"
    sharded: bool = False
    units_in_stages: bool = False
    clips: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "tokens", "micro_batches", "element_bytes", "weight_bytes"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"Step: {name}={getattr(self, name)}; expected 1 or more")
        if self.attention not in ("allgather", "alltoall", "ulysses"):
            raise InvalidArgument(
                f"Step: attention={self.attention!r}; expected 'allgather', 'alltoall' or 'ulysses', as "
                "TorchContextParallelConfig(cp_comm_strategy=...) takes it"
            )
        schedule_named(self.schedule)

    def bubble(self, stages_of_ranks: int) -> float:
        """The share of a step in which a rank of a pipeline of that many ranks waits; 0 without a pipeline."""
        if stages_of_ranks == 1:
            return 0.0
        each = schedule_named(self.schedule).stages_per_rank
        return bubble_fraction(self.schedule, each * stages_of_ranks, self.micro_batches)


def stages_of(mesh: Mesh, schedule: str) -> list[int]:
    """For each stage the place along ``pp`` of the ranks that have it."""
    size = mesh.size("pp")
    return [0] if size == 1 else schedule_named(schedule).ranks_of_stages(size)


def operations_of(stages: Sequence[Part], mesh: Mesh, step: Step) -> list[Operation]:
    """What the rank of ``mesh`` takes part in during ``step``; operations with nobody else are left out.

    Args:
        stages: of the model, all of them, as many as the schedule has.

    Raises:
        InvalidArgument: there is another number of stages, or tokens or heads cannot be shared out.
    """
    owners = stages_of(mesh, step.schedule)
    if len(stages) != len(owners):
        raise InvalidArgument(
            f"costs: {len(stages)} stages; expected {len(owners)} for pp={mesh.size('pp')} and schedule "
            f"{step.schedule!r}"
        )
    _require_fitting(stages[0], mesh, step)
    own = [part for part, owner in zip(stages, owners, strict=True) if owner == mesh.place("pp")]
    found: list[Operation] = []
    for part in own:
        found += _of_split_layers(part, mesh, step)
        found += _of_split_sequences(part, mesh, step)
    found += _of_stages(stages, owners, mesh, step)
    found += _of_copies_and_shards(own, mesh, step)
    if step.clips:
        found += _of_clipping(own, mesh, step)
    return [one for one in found if one.processes > 1 and one.count > 0]


def _require_fitting(part: Part, mesh: Mesh, step: Step) -> None:
    tp, cp = mesh.size("tp"), mesh.size("cp")
    if part.heads % tp or part.kv_heads % tp:
        raise InvalidArgument(
            f"costs: {part.heads} heads and {part.kv_heads} heads of keys over tp={tp}; choose a size that divides both"
        )
    if step.tokens % (cp * (1 if step.attention == "ulysses" or cp == 1 else 2)):
        raise InvalidArgument(f"costs: {step.tokens} tokens over cp={cp}; expected a multiple of {2 * cp}")
    if cp > 1 and step.attention == "ulysses" and part.heads // tp % cp:
        raise InvalidArgument(f"costs: {part.heads // tp} heads over cp={cp} by 'ulysses'; expected a multiple of {cp}")
    if step.sequence_parallel and step.tokens // cp % tp:
        raise InvalidArgument(
            f"costs: sequence_parallel with {step.tokens // cp} tokens over tp={tp}; expected a multiple of {tp}"
        )


def _axes(mesh: Mesh, *names: str) -> tuple[tuple[str, ...], int]:
    """Those of ``names`` along which there is more than one process, and how many there are along all."""
    active = tuple(axis for axis in AXES if axis in names and mesh.size(axis) > 1)
    return active, math.prod(map(mesh.size, active))


def _of_split_layers(part: Part, mesh: Mesh, step: Step) -> Iterator[Operation]:
    axes, n = _axes(mesh, "tp")
    if n == 1:
        return
    m, here = step.micro_batches, step.rows * (step.tokens // mesh.size("cp"))
    hidden = here * part.hidden * step.element_bytes
    ends = part.split_embedding + (part.gathered_features > 0)
    if step.sequence_parallel and part.rows:
        yield Operation(axes, n, "reduce_scatter", hidden, m * part.rows)
        yield Operation(axes, n, "all_gather", hidden // n, m * (part.rows + part.gathering + 2))
        yield Operation(axes, n, "all_reduce", hidden, m * (part.columns + ends))
        for elements in part.of_tokens:
            yield Operation(axes, n, "all_reduce", elements * step.weight_bytes, m)
    else:
        yield Operation(axes, n, "all_reduce", hidden, m * (part.columns + part.rows + ends))
    for elements in part.in_parts:
        yield Operation(axes, n, "all_reduce", elements * step.weight_bytes, m)
    if part.gathered_features and step.loss_parallel:
        numbers = here * max(4, step.element_bytes)  # of each token, in float32 at least
        yield Operation(axes, n, "all_reduce", numbers, m)  # the largest logit
        yield Operation(axes, n, "all_reduce", 2 * numbers, m)  # the sum of exponentials, and the logit of the label
    elif part.gathered_features:
        yield Operation(axes, n, "all_gather", here * part.gathered_features // n * step.element_bytes, m)


def _of_split_sequences(part: Part, mesh: Mesh, step: Step) -> Iterator[Operation]:
    axes, n = _axes(mesh, "cp")
    if n == 1:
        return
    calls = step.micro_batches * part.attentions
    tp, here = mesh.size("tp"), step.rows * (step.tokens // n)
    keys = here * part.kv_features // tp
    sums_bytes = max(4, step.element_bytes)  # sums are in float32 at least
    if step.attention == "allgather":
        yield Operation(axes, n, "all_gather", 2 * keys * step.element_bytes, 2 * calls)
        yield Operation(axes, n, "reduce_scatter", n * 2 * keys * sums_bytes, calls)
    elif step.attention == "alltoall":
        for kind in ("send", "receive"):
            yield Operation(axes, n, kind, 2 * keys * step.element_bytes, 2 * (n - 1) * calls)
            yield Operation(axes, n, kind, 2 * keys * sums_bytes, n * calls)
    else:
        kv_heads = part.kv_heads // tp
        repeats = n // math.gcd(n, kv_heads)
        queries = keys // kv_heads * (part.heads // tp)
        yield Operation(axes, n, "all_to_all", queries * step.element_bytes, 4 * calls)
        yield Operation(axes, n, "all_to_all", repeats * keys * step.element_bytes, 4 * calls)


def _of_stages(stages: Sequence[Part], owners: Sequence[int], mesh: Mesh, step: Step) -> Iterator[Operation]:
    axes, n = _axes(mesh, "pp")
    if n == 1:
        return
    place = mesh.place("pp")
    hidden = step.rows * step.tokens * stages[0].hidden * step.element_bytes
    for before, after in pairwise(owners):
        if before != after and place in (before, after):  # an activation one way, its gradient the other
            yield Operation(axes, n, "send", hidden, step.micro_batches)
            yield Operation(axes, n, "receive", hidden, step.micro_batches)
    yield Operation(axes, n, "broadcast", _LOSS_BYTES)
    yield from _of_tied_weights(stages, owners, mesh, step)


def _of_tied_weights(stages: Sequence[Part], owners: Sequence[int], mesh: Mesh, step: Step) -> Iterator[Operation]:
    """The first rank that has a weight adds the gradients of the others, and sends them the sum."""
    axes, n = _axes(mesh, "pp")
    place = mesh.place("pp")
    holding = [(owner, part) for owner, part in zip(owners, stages, strict=True) if part.tied]
    ranks = sorted({owner for owner, _ in holding})
    if len(ranks) < 2 or place not in ranks:
        return
    shards = _axes(mesh, "dp_shard", "cp")[1] if step.sharded else 1
    rows, hidden = _table_of(holding[0][1])
    elements = _rows_of_shard(rows, shards, _place_in_shards(mesh) if step.sharded else 0) * hidden
    times = len(ranks) - 1 if place == ranks[0] else 1
    for kind in ("send", "receive"):
        yield Operation(axes, n, kind, elements * step.weight_bytes, times)


def _table_of(part: Part) -> tuple[int, int]:
    return part.tied[0] // part.hidden, part.hidden


def _place_in_shards(mesh: Mesh) -> int:
    return mesh.place("dp_shard") * mesh.size("cp") + mesh.place("cp")


def _rows_of_shard(rows: int, shards: int, place: int) -> int:
    """How many of ``rows`` the process has, without those that fill up: gradients of shards are sent as they are."""
    each = -(-rows // shards)
    return max(0, min(each, rows - place * each))


def _of_copies_and_shards(own: Sequence[Part], mesh: Mesh, step: Step) -> Iterator[Operation]:
    staged = mesh.size("pp") > 1
    units = [unit for part in own for unit in _units(part, whole=staged and not step.units_in_stages)]
    tp, width = mesh.size("tp"), step.weight_bytes
    if not step.sharded:
        axes, n = _axes(mesh, "dp_replicate", "dp_shard", "cp")
        if staged or tp > 1:
            for part in own:
                yield Operation(axes, n, "all_reduce", sum(one.elements(tp) for one in part.weights) * width)
        else:
            for size_bytes in buckets_of(own[0].weights, width):
                yield Operation(axes, n, BUCKET, size_bytes)
        return
    shards, n = _axes(mesh, "dp_shard", "cp")
    copies, c = _axes(mesh, "dp_replicate")
    for unit, is_root in units:
        here = sum(one.padded_shard(tp, n) for one in unit) * width
        # Stages keep what they have gathered for the micro-batches; a root keeps it for its backward pass.
        gathers = 1 if staged else step.micro_batches * (1 if is_root else 2)
        yield Operation(shards, n, "all_gather", here, gathers)
        yield Operation(shards, n, "reduce_scatter", n * here)
        yield Operation(copies, c, "all_reduce", here)


def _units(part: Part, whole: bool) -> list[tuple[tuple[Weight, ...], bool]]:
    """The units of ``part``, and whether each is the root."""
    if whole:
        return [(tuple(part.weights), True)]
    return [(unit, number == len(part.units) - 1) for number, unit in enumerate(part.units) if unit]


def buckets_of(weights: Sequence[Weight], weight_bytes: int, cap_bytes: int = 25 * _MEBIBYTE) -> list[int]:
    """The bytes of the buckets in which ``DataParallel`` averages the gradients of ``weights``, last ones first.

    Gradients lie in slots of a multiple of 64 bytes; the first bucket has at most 1 MiB, unless one gradient has more.
    Their order is that in which gradients arrive, which is known after the first pass; here it is the reverse of
    ``weights``.
    """
    buckets: list[int] = []
    for weight in reversed(weights):
        size_bytes = -(-weight.elements() * weight_bytes // _SLOT_BYTES) * _SLOT_BYTES
        cap = min(_MEBIBYTE, cap_bytes) if len(buckets) == 1 else cap_bytes
        if buckets and buckets[-1] + size_bytes <= cap:
            buckets[-1] += size_bytes
        else:
            buckets.append(size_bytes)
    return buckets


def _of_clipping(own: Sequence[Part], mesh: Mesh, step: Step) -> Iterator[Operation]:
    """A number for each layout of parameters over each axis along which they are in parts, and one for all stages."""
    splits = {weight.split if mesh.size("tp") > 1 else None for part in own for weight in part.weights}
    layouts: Mapping[str, int] = {
        "shards": len(splits) if step.sharded else 0,
        "tp": len(splits - {None}),
    }
    shards, n = _axes(mesh, "dp_shard", "cp")
    yield Operation(shards, n, "all_reduce", _NUMBER_BYTES, layouts["shards"])
    for axis, count in (("tp", layouts["tp"]), ("pp", 1)):
        axes, size = _axes(mesh, axis)
        yield Operation(axes, size, "all_reduce", _NUMBER_BYTES, count)
