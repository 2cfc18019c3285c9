"""Where the stages of a pipeline begin: modules of a model that stand together, shared out evenly in bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.module_sizes import class_names

__all__ = ["choose_split_points"]

_AS_EVEN = 1.1
"""Modules are not split for stages that would be more even than this."""


@dataclass
class _Block:
    """Neighbouring parts of a model, the first of which a stage can begin with."""

    begins_with: str
    size: int


def choose_split_points(model: nn.Module, count: int, whole: str | Collection[str] | None = None) -> list[str]:
    """Names of the modules with which the second to the last of ``count`` stages begin, in the order of the model.

    The largest stage is as small as neighbours allow, but for a tenth, with which modules are not taken apart.

    Args:
        whole: names of classes of modules that are not taken apart.

    Raises:
        InvalidArgument: there are not that many modules to begin with.
    """
    kinds = class_names(whole)
    levels = [_blocks(model, depth, kinds) for depth in range(1, _depth(model) + 1)]
    cuts = [_cut(blocks, count) for blocks in levels if len(blocks) >= count]
    if not cuts:
        raise InvalidArgument(
            f"{type(model).__name__} has {len(levels[-1])} modules that a stage of a pipeline can begin with, and "
            f"there are {count} processes; start fewer"
        )
    least = min(largest for largest, _ in cuts)
    return next(names for largest, names in cuts if largest <= _AS_EVEN * least)


def _depth(module: nn.Module) -> int:
    """How deeply modules are nested, at least 1."""
    return 1 + max(map(_depth, module.children()), default=0)


def _blocks(model: nn.Module, depth: int, whole: Collection[str]) -> list[_Block]:
    """The modules at ``depth``; what no stage can begin with, such as a parameter, is in the block after it."""
    blocks: list[_Block] = []
    waiting = 0
    for name, size in _pieces(model, "", model, depth, whole):
        if name is None:
            waiting += size
        else:
            blocks.append(_Block(name, waiting + size))
            waiting = 0
    if blocks:
        blocks[-1].size += waiting
    return blocks


def _pieces(
    model: nn.Module, name: str, module: nn.Module, depth: int, whole: Collection[str]
) -> Iterator[tuple[str | None, int]]:
    """Each module at ``depth`` in ``module``, and what is beside it: what a stage may begin with, and its bytes.

    What modules share counts for each of them: each stage has it.
    """
    if depth == 0 or not module._modules or type(module).__name__ in whole:
        yield _first_called(model, name), _size(module, recurse=True)
        return
    yield None, _size(module, recurse=False)
    for label, child in module.named_children():
        yield from _pieces(model, f"{name}.{label}" if name else label, child, depth - 1, whole)


def _size(module: nn.Module, recurse: bool) -> int:
    return sum(tensor.nbytes for tensor in chain(module.parameters(recurse), module.buffers(recurse)))


def _first_called(model: nn.Module, name: str) -> str | None:
    """The module ``name``; for a list of modules, which is never called itself, the first module in it."""
    module = model.get_submodule(name)
    if type(module).forward is not nn.Module.forward:
        return name
    return next((found for label in module._modules if (found := _first_called(model, f"{name}.{label}"))), None)


def _cut(blocks: Sequence[_Block], count: int) -> tuple[int, list[str]]:
    """``count`` stages, as even as possible: the bytes of the largest, and with what all but the first begin."""
    low, high = max(block.size for block in blocks), sum(block.size for block in blocks)
    while low < high:
        middle = (low + high) // 2
        if len(_starts(blocks, middle, count)) <= count:
            high = middle
        else:
            low = middle + 1
    starts = _starts(blocks, high, count)
    ends = [*starts[1:], len(blocks)]
    largest = max(sum(block.size for block in blocks[start:end]) for start, end in zip(starts, ends, strict=True))
    return largest, [blocks[start].begins_with for start in starts[1:]]


def _starts(blocks: Sequence[_Block], limit: int, count: int) -> list[int]:
    """Where stages of at most ``limit`` bytes begin, filled in order; no fewer than ``count`` of them."""
    starts, load = [0], blocks[0].size
    for number, block in enumerate(blocks[1:], start=1):
        blocks_left, stages_left = len(blocks) - number, count - len(starts)
        if load + block.size > limit or blocks_left <= stages_left:
            starts.append(number)
            load = 0
        load += block.size
    return starts
