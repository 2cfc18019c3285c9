"""Stages of any model, by ``torch.export``: for what :mod:`cut` cannot cut. They take inputs of one shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.blocks import sendable

__all__ = ["CallInputs", "TracedStage", "tensors_in", "traced_stages"]

CallInputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named inputs of a forward pass."""


class TracedStage(nn.Module):
    """One of the parts that a traced model calls one after the other.

    It takes what the stages before it, or the caller, have made and it or a later stage needs; and returns the same for
    the next stage, or what the model returns: a tensor, or a tuple of the tensors in it.

    Args:
        calls: the node of the graph that calls the part.
        takes: the nodes whose values it gets.
        gives: the nodes whose values it returns, or the model's structure of them.
    """

    def __init__(self, part: nn.Module, calls: fx.Node, takes: Sequence[fx.Node], gives: Any) -> None:
        super().__init__()
        self.part = part
        self._calls, self._takes, self._gives = calls, tuple(takes), gives

    def forward(self, *inputs: Tensor) -> Any:
        values: dict[fx.Node, Any] = dict(zip(self._takes, inputs, strict=True))

        def read(structure: Any) -> Any:
            return fx.node.map_arg(structure, lambda node: values[node])

        result = self.part(*read(self._calls.args), **read(self._calls.kwargs))
        values[self._calls] = result
        for user in self._calls.users:
            if user.target is operator.getitem:
                values[user] = result[user.args[1]]
        given = read(self._gives)
        if isinstance(given, (tuple, list)):
            given = tuple(value for value in given if isinstance(value, Tensor))
            given = given[0] if len(given) == 1 else given
        return sendable(given)


def traced_stages(model: nn.Module, points: Sequence[str], example: CallInputs) -> list[nn.Module]:
    """``model`` in stages, which share its parameters and take the tensors of its inputs.

    Args:
        points: the names of the modules with which the second to the last stage begin.
        example: inputs on the device of the model. Stages take tensors of these shapes; other values in it are fixed.

    Raises:
        InvalidArgument: torch cannot trace the model, or not in stages that begin with ``points``.
    """
    from torch.distributed.pipelining import pipeline

    # Without gradients; otherwise blocks that switch them off would stay separate functions, which stages cannot call.
    with _splitting_before(model, points), torch.no_grad():
        try:
            pipe = pipeline(_Root(model, example), tuple(tensors_in(example)))
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise InvalidArgument(
                f"pipeline: torch.export cannot trace {type(model).__name__} in stages that begin with "
                f"{', '.join(points)} ({type(cause).__name__}: {shorten(str(cause), 200)}); switch off caches "
                "(use_cache=False) and branches that depend on values, or try other split_points"
            ) from error
    if pipe.num_stages != len(points) + 1:
        raise InvalidArgument(
            f"pipeline: splitting {type(model).__name__} at {', '.join(points)} gave {pipe.num_stages} stages; "
            f"expected {len(points) + 1}: name modules that each forward pass calls exactly once, after its first "
            "operation"
        )
    return _stages_of(pipe.split_gm)


def tensors_in(inputs: CallInputs) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def _stages_of(whole: fx.GraphModule) -> list[nn.Module]:
    """The parts that ``whole`` calls, each with the values that it passes on."""
    calls = [node for node in whole.graph.nodes if node.op == "call_module"]
    made = [node for node in whole.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in whole.graph.nodes if node.op == "output")
    takes = made
    stages: list[nn.Module] = []
    for number, call in enumerate(calls):
        made = [*made, call, *(user for user in call.users if user.target is operator.getitem)]
        later = {node for user in (*calls[number + 1 :], output) for node in user.all_input_nodes}
        gives: Any = [node for node in made if node in later] if call is not calls[-1] else output.args[0]
        stages.append(TracedStage(whole.get_submodule(str(call.target)), call, takes, gives))
        takes = gives
    return stages


class _Root(nn.Module):
    """A model that takes only the tensors of its inputs; all other inputs are those of ``example``."""

    def __init__(self, model: nn.Module, example: CallInputs) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = tree_flatten(example)
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def forward(self, *tensors: Tensor) -> Any:
        waiting = iter(tensors)
        leaves = [constant[0] if constant else next(waiting) for constant in self._constants]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self.model(*args, **kwargs)


@contextmanager
def _splitting_before(model: nn.Module, points: Sequence[str]) -> Iterator[None]:
    """Makes the modules ``points`` begin stages when they are traced."""
    before: list[tuple[nn.Module, Any]] = []
    try:
        for name in points:
            try:
                module = model.get_submodule(name)
            except AttributeError as error:
                raise InvalidArgument(
                    f"pipeline: split_points has {name!r}, but {type(model).__name__} has no such module"
                ) from error
            before.append((module, module.__dict__.get("forward")))
            module.forward = _behind_split(module.forward)
        yield
    finally:
        for module, forward in before:
            del module.forward
            if forward is not None:
                module.forward = forward


def _behind_split(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.distributed.pipelining import pipe_split

    def split_before(*args: Any, **kwargs: Any) -> Any:
        pipe_split()
        return forward(*args, **kwargs)

    return split_before
