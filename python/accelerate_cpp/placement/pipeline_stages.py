"""Where the stages of a pipeline begin: modules of a model that stand together, shared out evenly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from torch import nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Divisible, cost_of
from accelerate_cpp.parallel.pipeline.cut import balanced_starts, divide
from accelerate_cpp.parallel.pipeline.decoder import DivisibleDecoder
from accelerate_cpp.placement.module_sizes import class_names

__all__ = ["choose_split_points"]

_AS_EVEN = 0.1
"""Modules are not taken apart for stages that would be more even than by this."""


def choose_split_points(model: nn.Module, count: int, whole: str | Collection[str] | None = None) -> list[str]:
    """Names of the modules with which the second to the last of ``count`` stages begin, in the order of the model.

    The most expensive stage is as cheap as neighbours allow, but for a tenth, with which modules are not taken apart.
    The cost is that of stages that are trained. Layers of a decoder of Transformers are not taken apart.

    Args:
        whole: names of classes of modules that are not taken apart.

    Raises:
        InvalidArgument: there are not that many modules to begin with.
    """
    kinds = class_names(whole)
    parts = _Parts(model, kinds)
    try:
        divisible = divide(model)
    except InvalidArgument:
        return parts.split_points(count)
    between = _between_blocks(model, divisible, kinds)
    enough = len(between.names) >= count
    if enough and (
        isinstance(divisible, DivisibleDecoder) or between.largest(count) <= (1 + _AS_EVEN) * parts.largest(count)
    ):
        return between.split_points(count)
    return parts.split_points(count)


class _Blocks:
    """Neighbouring parts of a model: what a stage may begin with, what each costs, and which make up a module."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.names: list[str] = []
        self.costs: list[int] = []
        self.modules: list[tuple[int, int]] = []

    def split_points(self, count: int) -> list[str]:
        return [self.names[start] for start in self._starts(count)[1:]]

    def largest(self, count: int) -> int:
        """The cost of the most expensive stage."""
        starts = self._starts(count)
        ends = [*starts[1:], len(self.costs)]
        return max(sum(self.costs[start:end]) for start, end in zip(starts, ends, strict=True))

    def _starts(self, count: int) -> list[int]:
        if len(self.names) < count:
            raise InvalidArgument(
                f"{self._kind} has {len(self.names)} modules that a stage of a pipeline can begin with, and there are "
                f"{count} processes; start fewer"
            )
        return balanced_starts(self.costs, count, self.modules, _AS_EVEN if self.modules else 0)


class _Parts(_Blocks):
    """The smallest modules of any model, or those of the classes ``whole``.

    What no stage can begin with, such as a parameter, is in the block after it. What modules share counts for each of
    them: each stage has it.
    """

    def __init__(self, model: nn.Module, whole: Collection[str]) -> None:
        super().__init__(type(model).__name__)
        self._model, self._whole, self._waiting = model, whole, 0
        self._add("", model)
        if self.costs:
            self.costs[-1] += self._waiting

    def _add(self, name: str, module: nn.Module) -> None:
        if not module._modules or type(module).__name__ in self._whole:
            begins = _first_called(self._model, name)
            self._waiting += cost_of([module])
            if begins is not None:
                self.names.append(begins)
                self.costs.append(self._waiting)
                self._waiting = 0
            return
        own = chain(module.parameters(recurse=False), module.buffers(recurse=False))
        self._waiting += sum(2 * tensor.nbytes for tensor in own)
        begin = len(self.names)
        for label, child in module.named_children():
            self._add(f"{name}.{label}" if name else label, child)
        if name and len(self.names) > begin:
            self.modules.append((begin, len(self.names)))
            self.names[begin] = _first_called(self._model, name) or name


def _first_called(model: nn.Module, name: str) -> str | None:
    """The module ``name``; for a list of modules, which is never called itself, the first module in it."""
    module = model.get_submodule(name)
    if type(module).forward is not nn.Module.forward:
        return name
    return next((found for label in module._modules if (found := _first_called(model, f"{name}.{label}"))), None)


def _between_blocks(model: nn.Module, divisible: Divisible, whole: Collection[str]) -> _Blocks:
    """The blocks of a model that can be cut; those inside one module of the classes ``whole`` are one."""
    found = _Blocks(type(model).__name__)
    around: str | None = None
    for block in divisible.blocks:
        inside = _outermost(model, block.names, whole)
        if inside is not None and inside == around:
            found.costs[-1] += block.cost
        else:
            found.names.append(block.names[0])
            found.costs.append(block.cost)
        around = inside
    return found


def _outermost(model: nn.Module, names: Sequence[str], whole: Collection[str]) -> str | None:
    """The name of the outermost module of the classes ``whole`` around the module that is named first."""
    labels = names[0].split(".")
    for depth in range(len(labels)):
        name = ".".join(labels[:depth])
        if type(model.get_submodule(name)).__name__ in whole:
            return name
    return None
