"""The forward pass of a model through stages on several ranks, for outputs alone: ``prepare_pippy``.

Stages are those of :mod:`cut` where these can compute the example, and traced ones (:mod:`traced`) otherwise. What
follows is the same for both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument, PeerLost, Timeout
from accelerate_cpp.parallel.pipeline.blocks import Batch, Batches
from accelerate_cpp.parallel.pipeline.cut import cut_model
from accelerate_cpp.parallel.pipeline.evaluation import KnownShapes, evaluate
from accelerate_cpp.parallel.pipeline.micro_batches import MicroBatches
from accelerate_cpp.parallel.pipeline.outputs import Outputs, given_to_all
from accelerate_cpp.parallel.pipeline.shapes import Passed, described
from accelerate_cpp.parallel.pipeline.traced import CallInputs, tensors_in, traced_stages

__all__ = ["PipelinedForward"]

_MORE_OUTPUTS = ("output_hidden_states", "output_attentions")
"""What a decoder may return beside logits, by the names in its configuration."""


class PipelinedForward:
    """The replacement for the ``forward`` of a model: runs it through one stage on each of all ranks.

    All ranks call it, with the inputs of rank 0. Nothing is recorded for gradients.

    Args:
        model: the same on all ranks; it is not changed but for the parameters of this rank's stage, which are moved to
            ``device``.
        points: the names of the modules with which the second to the last stage begin.
        example: positional and named inputs with as many rows as a part of a batch has.
        num_chunks: how many parts of a batch are in progress at once.
        gather_output: give the output to all ranks, not only to the last one.
        device: of this rank.

    Attributes:
        stage: what this rank computes.

    Raises:
        InvalidArgument: the example has no rows, or the model cannot be cut at ``points``.
    """

    def __init__(
        self,
        model: nn.Module,
        points: Sequence[str],
        example: CallInputs,
        num_chunks: int,
        gather_output: bool,
        device: torch.device,
    ) -> None:
        self.__wrapped__ = model.forward
        rows = _rows_of(example)
        if not rows:
            raise InvalidArgument(
                "prepare_pippy: example_args and example_kwargs have no tensor with rows; pass the inputs of a forward "
                "pass, all tensors with equally many rows"
            )
        self._rows, self._num_chunks, self._gather_output = rows, num_chunks, gather_output
        self._device, self._ranks = device, list(range(dist.get_world_size()))
        staged = _cut(model, points, example, device) or _traced(model, points, example, device)
        self.stage, self._read, self._any_rows = staged.stage, staged.read, staged.any_rows
        self._shapes = staged.shapes

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch, told = self._agree((args, kwargs))
        outputs = Outputs()
        at_once = self._num_chunks * self._rows
        for begin in range(0, told.rows, at_once):
            self._run(_between(batch, told.rows, begin, begin + at_once), told.inputs_of(begin, at_once), outputs)
        output = outputs.joined() if dist.get_rank() == self._ranks[-1] else None
        return given_to_all(output, self._ranks[-1], None, self._device) if self._gather_output else output

    def _run(self, batch: Batch, inputs: Passed, outputs: Outputs) -> None:
        count = math.ceil(inputs[0][0][0] / self._rows)
        size = None if self._any_rows else self._rows
        parts = MicroBatches(batch, count, self._device, size, None if batch.args else inputs)
        passed = self._shapes.of(parts, self._device)

        def last(result: Any, number: int) -> None:
            outputs.keep(parts.without_repeated(result, number))

        here = {dist.get_rank(): self.stage}
        evaluate(here, self._ranks, passed, None, self._device, parts, last)

    def _agree(self, inputs: CallInputs) -> tuple[Batch, _Told]:
        """The batch of rank 0: all of it there, and what all stages take on other ranks.

        Raises:
            InvalidArgument: on all ranks, if the stages do not take these inputs.
        """
        is_first = dist.get_rank() == 0
        batch = Batch((), {}, None)
        said: list[Any] = [None]
        if is_first:
            try:
                batch = self._read(*inputs)
                said = [_Told.of(batch)]
            except InvalidArgument as error:
                said = [str(error)]
        dist.broadcast_object_list(said, src=0)
        told: Any = said[0]
        if isinstance(told, str):
            raise InvalidArgument(told)
        named = {}
        for name, form in told.named.items():
            if not isinstance(form, _Form):
                named[name] = form
                continue
            value = batch.kwargs[name].to(self._device).contiguous() if is_first else form.empty(self._device)
            dist.broadcast(value, src=0)
            named[name] = value
        return Batch(batch.args, named, None), told


@dataclass(frozen=True)
class _Form:
    """In place of a tensor, which follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Told:
    """What rank 0 says of a batch: the inputs of the first stage, which stay there, and those of all stages."""

    inputs: Passed
    named: dict[str, Any]

    @classmethod
    def of(cls, batch: Batch) -> _Told:
        """Raises InvalidArgument if tensors do not have equally many rows."""
        MicroBatches(batch, 1, torch.device("meta"))
        named = {
            name: _Form(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
            for name, value in batch.kwargs.items()
        }
        return cls(described(batch.args), named)

    @property
    def rows(self) -> int:
        return self.inputs[0][0][0]

    def inputs_of(self, begin: int, rows: int) -> Passed:
        count = min(rows, self.rows - begin)
        return tuple(((count, *shape[1:]), dtype) for shape, dtype in self.inputs)


@dataclass(frozen=True)
class _Staged:
    """A model in stages, of which this rank has one.

    Attributes:
        read: makes a batch of the inputs of a forward pass.
        any_rows: whether parts of a batch may have any number of rows, and else those of the example.
    """

    stage: nn.Module
    shapes: KnownShapes
    read: Callable[[tuple[Any, ...], dict[str, Any]], Batch]
    any_rows: bool


def _cut(model: nn.Module, points: Sequence[str], example: CallInputs, device: torch.device) -> _Staged | None:
    """The stages of :mod:`cut`; ``None`` on all ranks if these cannot compute what the model does for the example."""
    if any(getattr(getattr(model, "config", None), name, False) for name in _MORE_OUTPUTS):
        return None
    try:
        cut = cut_model(model, len(points) + 1, points)
        read = _reader(model, cut.batches)
        read(*example)
    except InvalidArgument:
        return None
    stage, ranks = cut.stages[dist.get_rank()], list(range(len(cut.stages)))
    shapes = KnownShapes({dist.get_rank(): stage}, ranks, None, cut.batches.shapes_follow_inputs)
    there = next(iter(tensors_in(example))).device
    try:
        shapes.of(MicroBatches(read(*example), 1, there), there)
    except (PeerLost, Timeout):
        raise
    except Exception:  # Tracing says what is wrong, if that cannot do it, either.
        return None
    stage.to(device)
    return _Staged(stage, shapes, read, any_rows=True)


def _traced(model: nn.Module, points: Sequence[str], example: CallInputs, device: torch.device) -> _Staged:
    name, expected = type(model).__name__, _described(example)
    order = list(example[1])

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        inputs: CallInputs = args, {name: kwargs[name] for name in (*order, *kwargs) if name in kwargs}
        found = _described(inputs)
        if expected != found or not _rows_of(inputs):
            raise InvalidArgument(
                f"the pipeline of {name} was traced for inputs {expected}, and rank 0 passed {found} (... are rows, "
                "of which all tensors need equally many, at least one); pass inputs like the traced ones, or call "
                "prepare_pippy again with an example of these"
            )
        return Batch(tuple(tensors_in(inputs)), {}, None)

    stages = traced_stages(model, points, example)
    stage = stages[dist.get_rank()].to(device)
    shapes = KnownShapes({dist.get_rank(): stage}, range(len(stages)), None, follow_inputs=False)
    return _Staged(stage, shapes, read, any_rows=False)


def _reader(model: nn.Module, batches: Batches) -> Callable[[tuple[Any, ...], dict[str, Any]], Batch]:
    signature, name = inspect.signature(model.forward), type(model).__name__
    rest = next((one.name for one in signature.parameters.values() if one.kind is one.VAR_KEYWORD), None)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        try:
            inputs = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError as error:
            raise InvalidArgument(f"the pipeline of {name}: {error}; pass what the model takes") from error
        named: Mapping[str, Any] = inputs.pop(rest, {}) if rest is not None else {}
        return batches.read_call({**inputs, **named})

    return read


def _between(batch: Batch, rows: int, begin: int, end: int) -> Batch:
    """The rows of ``batch``, of which there are ``rows``, from ``begin`` to before ``end``."""

    def one(value: Any) -> Any:
        return value[begin:end] if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows else value

    return Batch(tuple(map(one, batch.args)), {name: one(value) for name, value in batch.kwargs.items()}, None)


def _rows_of(inputs: CallInputs) -> int | None:
    """The number of rows of all tensors in ``inputs``; ``None`` if there are no tensors, or their numbers differ."""
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors_in(inputs)}
    return sizes.pop() if len(sizes) == 1 else None


def _described(inputs: CallInputs) -> str:
    """The dtypes and shapes without the rows; values that are not tensors, unchanged."""

    def one(value: Any) -> Any:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(['...', *map(str, value.shape[1:])])}]"
        if isinstance(value, (list, tuple)):
            return f"({', '.join(map(one, value))})"
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key}: {one(child)}' for key, child in value.items())}}}"
        return repr(value)

    args, kwargs = inputs
    named = [f"{name}={one(value)}" for name, value in kwargs.items()]
    return f"({', '.join([*map(one, args), *named])})"
