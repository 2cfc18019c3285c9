"""Where a model is cut into stages, and which weights several stages have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from accelerate_cpp._native import balanced_partition
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Batches, Block, Divisible
from accelerate_cpp.parallel.pipeline.decoder import DivisibleDecoder
from accelerate_cpp.parallel.pipeline.sequential import DivisibleSequential

__all__ = ["Cut", "Tie", "balanced_starts", "cut_model", "divide"]

_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Tie:
    """A parameter that several stages have: by stage, its name there."""

    names: dict[int, str]


@dataclass(frozen=True)
class Cut:
    """A model in stages.

    Attributes:
        batches: how batches of the model look.
        stages: they share the parameters of the model; names in them are those in the model.
        begins: the module with which each of them begins.
        ties: parameters that several of them have.
    """

    batches: Batches
    stages: list[nn.Module]
    begins: list[str]
    ties: list[Tie]


def cut_model(model: nn.Module, count: int, split_points: Sequence[str] | None = None) -> Cut:
    """``model`` in ``count`` stages, each with at least one block: an entry of a sequence, a layer of a decoder.

    Args:
        model: an ``nn.Sequential``, or a decoder of Transformers. It is not changed.
        split_points: names of the modules with which the second to the last stage begin, in order. By default, the
            most expensive stage is as cheap as possible: bytes of parameters, and again of those that each token is
            multiplied with.

    Raises:
        InvalidArgument: the model is of another kind, has fewer blocks than stages, or ``split_points`` are not
            ``count - 1`` names of blocks in order.
    """
    divisible = divide(model)
    blocks = divisible.blocks
    if len(blocks) < count:
        raise InvalidArgument(
            f"pipeline: {type(model).__name__} has {len(blocks)} blocks that a stage can begin with, but {count} "
            "stages are needed; use fewer ranks, or a schedule with one stage on each"
        )
    if split_points is None:
        starts = balanced_starts([block.cost for block in blocks], count)
    else:
        starts = _named(type(model).__name__, blocks, count, split_points)
    ends = [*starts[1:], len(blocks)]
    stages = [divisible.stage(begin, end) for begin, end in zip(starts, ends, strict=True)]
    return Cut(divisible.batches, stages, [blocks[start].names[0] for start in starts], _ties(stages))


def divide(model: nn.Module) -> Divisible:
    """``model``, which is not changed, as blocks between which it can be cut.

    Raises:
        InvalidArgument: it is neither an ``nn.Sequential`` nor a decoder of Transformers, or it is one that does more
            than to call its blocks.
    """
    if DivisibleSequential.accepts(model):
        return DivisibleSequential(model)
    if DivisibleDecoder.accepts(model):
        return DivisibleDecoder(model)
    raise InvalidArgument(
        f"pipeline: {type(model).__name__} cannot be cut into stages; expected an nn.Sequential without code of its "
        "own, or a decoder of Transformers (...ForCausalLM): write the model as an nn.Sequential, where split_points "
        "choose the stages, or write stages with torch.distributed.pipelining"
    )


def balanced_starts(
    costs: Sequence[int], count: int, modules: Sequence[tuple[int, int]] = (), tolerance: float = 0.0
) -> list[int]:
    """The blocks with which ``count`` stages begin, of which the most expensive is as cheap as possible.

    Args:
        costs: of the blocks, at least ``count`` of them.
        modules: which blocks, from the first to before the last, make up a module. Few of them are cut if that makes
            stages uneven by no more than ``tolerance`` (0.1 for 10 %).
    """
    # With positive costs, the most even partition, which is what is found, leaves no stage without a block.
    sizes, limits = [cost + 1 for cost in costs], [_NO_LIMIT] * count
    stages = balanced_partition(block_bytes=sizes, capacities=limits, modules=modules, tolerance=tolerance) or []
    if len(set(stages)) < count:
        stages = balanced_partition(block_bytes=sizes, capacities=limits) or []
    return [stages.index(stage) for stage in range(count)]


def _named(name: str, blocks: Sequence[Block], count: int, split_points: Sequence[str]) -> list[int]:
    if len(split_points) != count - 1:
        raise InvalidArgument(
            f"pipeline: split_points={list(split_points)} make {len(split_points) + 1} stages; expected {count - 1} "
            f"names for {count} stages"
        )
    numbers = {begin: number for number, block in enumerate(blocks) for begin in block.names}
    starts = [0]
    for point in split_points:
        if point not in numbers:
            raise InvalidArgument(
                f"pipeline: split_points has {point!r}, with which no stage of {name} can begin; expected names among "
                f"{', '.join(block.names[0] for block in blocks[1:])}"
            )
        if numbers[point] <= starts[-1]:
            raise InvalidArgument(
                f"pipeline: split_points={list(split_points)} are not in the order of {name}, or leave a stage without "
                f"a module; {point!r} is at fault"
            )
        starts.append(numbers[point])
    return starts


def _ties(stages: Sequence[nn.Module]) -> list[Tie]:
    found: dict[int, dict[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            found.setdefault(id(parameter), {}).setdefault(number, name)
    return [Tie(names) for names in found.values() if len(names) > 1]
