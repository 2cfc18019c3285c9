"""How an ``nn.Sequential`` is cut: between its entries, also of those that are sequences themselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import Batch, Batches, Block, cost_of, sendable

__all__ = ["DivisibleSequential", "SequentialBatches", "SequentialStage"]


def _only_calls_entries(module: nn.Module) -> bool:
    """Whether it is nothing but its entries: no code, parameters or hooks of its own."""
    own = (module._parameters, module._buffers, module._forward_hooks, module._forward_pre_hooks)
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in module.__dict__
        and not any(own)
    )


def _entries(module: nn.Module, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    for name, child in module._modules.items():
        if child is None:
            continue
        if _only_calls_entries(child) and len(child._modules):
            yield from _entries(child, (*path, name))
        else:
            yield (*path, name), child


def _begun(entries: Sequence[tuple[tuple[str, ...], nn.Module]], at: int) -> Iterator[str]:
    """The names of the entry at a place, and of the sequences that begin with it."""
    path, before = entries[at][0], entries[at - 1][0] if at else ()
    yield ".".join(path)
    for depth in range(len(path) - 1, 0, -1):
        if before[:depth] == path[:depth]:
            return
        yield ".".join(path[:depth])


class SequentialStage(nn.Sequential):
    """Neighbouring entries of a sequence under their names there.

    Its inputs are what the entry before returned, a tensor or the tensors of a tuple.
    """

    def forward(self, *inputs: Tensor) -> Any:
        value: Any = inputs[0] if len(inputs) == 1 else inputs
        for module in self:
            value = module(value)
        return sendable(value)


class DivisibleSequential:
    """An ``nn.Sequential`` as blocks, its entries.

    Args:
        model: not changed; stages share its modules.
    """

    @staticmethod
    def accepts(model: nn.Module) -> bool:
        return _only_calls_entries(model)

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.batches: Batches = SequentialBatches()
        self._entries = list(_entries(model, ()))
        self.blocks = [
            Block(tuple(_begun(self._entries, at)), cost_of([module])) for at, (_, module) in enumerate(self._entries)
        ]

    def stage(self, begin: int, end: int) -> nn.Module:
        training = self._model.training
        stage = SequentialStage(_nested(self._entries[begin:end], 0, training))
        stage.training = training
        return stage


class SequentialBatches:
    """Batches of an ``nn.Sequential``: tensors, and targets of any kind."""

    shapes_follow_inputs = False

    def read(self, inputs: Any, targets: Any, kwargs: Mapping[str, Any] | None) -> Batch:
        args = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        if kwargs:
            raise InvalidArgument(f"pipeline: an nn.Sequential takes no named inputs, but got {', '.join(kwargs)}")
        if not args or not all(isinstance(value, Tensor) for value in args):
            raise InvalidArgument(
                f"pipeline: an nn.Sequential takes a tensor or a tuple of tensors, but got {type(inputs).__name__}; "
                "hand over labels as targets="
            )
        return Batch(tuple(args), {}, targets)

    def read_call(self, inputs: Mapping[str, Any]) -> Batch:
        return self.read(inputs.get("input"), None, None)

    def default_loss(self, outputs: Any, targets: Any, count: float) -> Tensor:
        raise NotImplementedError("an nn.Sequential has no loss of its own")

    def counted(self, targets: Any) -> int | None:
        return None


def _nested(
    entries: Sequence[tuple[tuple[str, ...], nn.Module]], depth: int, training: bool
) -> OrderedDict[str, nn.Module]:
    """The entries by their names at ``depth``, in sequences again where they were."""
    found: OrderedDict[str, list[tuple[tuple[str, ...], nn.Module]]] = OrderedDict()
    for path, module in entries:
        found.setdefault(path[depth], []).append((path, module))
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for name, inner in found.items():
        if len(inner[0][0]) == depth + 1:
            children[name] = inner[0][1]
        else:
            children[name] = nn.Sequential(_nested(inner, depth + 1, training))
            children[name].training = training
    return children
