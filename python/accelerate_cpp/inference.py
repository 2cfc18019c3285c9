"""Pipelined inference: each process runs one stage of a model, and batches pass through the stages in small parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.placement.pipeline_stages import choose_split_points
from accelerate_cpp.state import PartialState
from accelerate_cpp.utils.operations import (
    broadcast,
    broadcast_object_list,
    concatenate,
    get_data_structure,
    initialize_tensors,
    send_to_device,
)

__all__ = ["prepare_pippy"]

__getattr__ = lending("inference")

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Splits ``model`` into one stage per process, and makes its forward passes run through all stages.

    Every process has to call this function, and then the model, the same number of times. The inputs are those of rank
    0; inputs of other processes are ignored. The last process gets the output, a tensor or a tuple of the tensors in
    it, with the rows of the inputs; the others get ``None``. Nothing is recorded for gradients. The stages are traced
    by ``torch.export``, as the model is now: call ``model.eval()`` before.

    Args:
        model: on the CPU or the device of this process; the same on all processes. With one process it is returned
            unchanged.
        split_points: names of the modules with which the second to the last stage begin. ``"auto"`` creates stages of
            about equal size in bytes.
        no_split_module_classes: names of classes of modules that ``"auto"`` does not split.
        example_args: positional inputs of the size that a stage gets at a time; only shapes and dtypes matter. Larger
            batches are cut into parts with that many rows; the last part is padded, and the padding is removed from the
            output.
        example_kwargs: named inputs, likewise.
        num_chunks: how many parts are in progress at once; by default one per process.
        gather_output: give the output to all processes.

    Returns:
        ``model``, which has the names of the modules that begin stages as ``hf_split_points``, and torch's schedule of
        this process as ``pippy_stage``.

    Raises:
        InvalidArgument: there are not as many stages as processes, there is no example with rows, or torch cannot trace
            the model. In a forward pass, on all processes: inputs that differ from the example in more than their
            number of rows.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from accelerate_cpp import PartialState, debug_launcher, prepare_pippy
        >>> def work():
        ...     state = PartialState()
        ...     model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).eval()
        ...     model = prepare_pippy(model, split_points=["1"], example_args=(torch.ones(2, 2),), gather_output=True)
        ...     with torch.no_grad():
        ...         return model(torch.ones(2, 2)).shape
        >>> debug_launcher(work, num_processes=2)
        [torch.Size([2, 1]), torch.Size([2, 1])]
    """
    state = PartialState()
    count = state.num_processes
    chunks = count if num_chunks is None else num_chunks
    if chunks < 1:
        raise InvalidArgument(f"prepare_pippy: num_chunks={num_chunks}; expected at least 1")
    if split_points is None or split_points == "auto":
        points = choose_split_points(model, count, no_split_module_classes)
    else:
        points = [split_points] if isinstance(split_points, str) else list(split_points)
    if len(points) != count - 1:
        raise InvalidArgument(
            f"prepare_pippy: split_points={points} make {len(points) + 1} stages, but there are {count} processes; "
            f"expected {count - 1} names"
        )
    model.hf_split_points = points  # type: ignore[assignment]
    if isinstance(model.__dict__.get("forward"), PipelinedForward):
        del model.forward
    if count > 1:
        example = _on_device_of(model, (tuple(example_args or ()), dict(example_kwargs or {})))
        run = PipelinedForward(model, points, example, chunks, bool(gather_output))
        model.pippy_stage = run.schedule
        model._original_forward = run.__wrapped__  # type: ignore[assignment]
        model.forward = run
    return model


def _on_device_of(model: nn.Module, inputs: _Inputs) -> _Inputs:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    moved: _Inputs = send_to_device(inputs, device)
    return moved


class PipelinedForward:
    """The replacement for the ``forward`` of a pipelined model; see :func:`prepare_pippy`.

    Args:
        points: names of the modules with which the second to the last stage begin.
        example: positional and named inputs.
        num_chunks: how many parts of a batch are in progress at once.
        gather_output: give the output to all processes.

    Attributes:
        schedule: torch's schedule of this process.
    """

    def __init__(
        self, model: nn.Module, points: Sequence[str], example: _Inputs, num_chunks: int, gather_output: bool
    ) -> None:
        self.__wrapped__ = model.forward
        self._state = PartialState()
        self._name = type(model).__name__
        self._example = example
        self._rows = _rows_of(example)
        if self._rows is None:
            raise InvalidArgument(
                "prepare_pippy: example_args and example_kwargs have no tensor with rows; pass the inputs of a forward "
                "pass, all tensors with equally many rows"
            )
        self._num_chunks, self._gather_output = num_chunks, gather_output
        self._stage = _trace(model, points, example).build_stage(self._state.process_index, self._state.device)
        self.schedule = self._schedule_of(num_chunks)

    def _schedule_of(self, chunks: int) -> Any:
        from torch.distributed.pipelining import ScheduleGPipe

        return ScheduleGPipe(self._stage, chunks)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs: _Inputs = ((), {})
        if self._state.is_main_process:
            inputs = args, {name: kwargs[name] for name in (*self._example[1], *kwargs) if name in kwargs}
        rows = self._agree(inputs)
        outputs: list[Any] = []
        at_once = self._num_chunks * (self._rows or 1)
        for begin in range(0, rows, at_once):
            outputs.append(self._run(inputs, begin, min(begin + at_once, rows)))
        output = concatenate(outputs) if self._state.is_last_process and len(outputs) > 1 else outputs[0]
        return self._given_to_all(output) if self._gather_output else output

    def _run(self, inputs: _Inputs, begin: int, end: int) -> Any:
        """On the last process, the output for rows ``begin`` to ``end``, at most as many as are in progress at once."""
        size, rows = self._rows or 1, end - begin
        chunks = math.ceil(rows / size)
        if chunks != self.schedule._n_microbatches:
            self.schedule = self._schedule_of(chunks)

        def filled_up(tensor: Tensor) -> Tensor:
            part = tensor[begin:end].to(self._state.device)
            return torch.cat([part, part.new_zeros((chunks * size - rows, *part.shape[1:]))])

        output = self.schedule.step(*map(filled_up, _tensors_in(inputs)))
        return tree_map_only(
            Tensor,
            lambda tensor: tensor[:rows] if tensor.ndim > 0 and tensor.shape[0] == chunks * size else tensor,
            output,
        )

    def _agree(self, inputs: _Inputs) -> int:
        """The rows of the inputs of rank 0, on all processes.

        Raises:
            InvalidArgument: on all processes, if the inputs are not like the example.
        """
        said: list[Any] = [0, None]
        if self._state.is_main_process:
            said = [_rows_of(inputs), self._objection(inputs)]
        rows, objection = broadcast_object_list(said)
        if objection is not None:
            raise InvalidArgument(objection)
        return int(rows)

    def _objection(self, inputs: _Inputs) -> str | None:
        """What is wrong with ``inputs``."""
        expected, found = _described(self._example), _described(inputs)
        if expected == found and _rows_of(inputs):
            return None
        return (
            f"the pipeline of {self._name} was traced for inputs {expected}, and rank 0 passed {found} (... are rows, "
            "of which all tensors need equally many, at least one); pass inputs like the traced ones, or call "
            "prepare_pippy again with an example of these"
        )

    def _given_to_all(self, output: Any) -> Any:
        last = self._state.num_processes - 1
        structure = broadcast_object_list([get_data_structure(output)], from_process=last)[0]
        if not self._state.is_last_process:
            output = send_to_device(initialize_tensors(structure), self._state.device)
        return broadcast(output, from_process=last)


def _tensors_in(inputs: _Inputs) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def _rows_of(inputs: _Inputs) -> int | None:
    """The number of rows of all tensors in ``inputs``; ``None`` if there are no tensors, or their numbers differ."""
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in _tensors_in(inputs)}
    return sizes.pop() if len(sizes) == 1 else None


def _described(inputs: _Inputs) -> str:
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


class _Root(nn.Module):
    """A model that takes only the tensors of its inputs; all other inputs are those of ``example``.

    The first stage reads all of them: torch only passes the results of a stage to later ones.
    """

    def __init__(self, model: nn.Module, example: _Inputs) -> None:
        super().__init__()
        self.model = model
        leaves, self._structure = tree_flatten(example)
        self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def forward(self, *tensors: Tensor) -> Any:
        waiting = iter(tensors)
        leaves = [constant[0] if constant else _read(next(waiting)) for constant in self._constants]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return self.model(*args, **kwargs)


def _read(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _trace(model: nn.Module, points: Sequence[str], example: _Inputs) -> Any:
    """The model in stages, as torch creates them."""
    from torch.distributed.pipelining import pipeline

    # Without gradients; otherwise blocks that switch them off would stay separate functions, which stages cannot call.
    with _splitting_before(model, points), torch.no_grad():
        try:
            pipe = pipeline(_Root(model, example), tuple(_tensors_in(example)), split_policy=_in_one_piece)
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            raise InvalidArgument(
                f"prepare_pippy: torch.export cannot trace {type(model).__name__} in stages that begin with "
                f"{', '.join(points)} ({type(cause).__name__}: {shorten(str(cause), 200)}); switch off caches "
                "(use_cache=False) and branches that depend on values, or try other split_points"
            ) from error
    if pipe.num_stages != len(points) + 1:
        raise InvalidArgument(
            f"prepare_pippy: splitting {type(model).__name__} at {', '.join(points)} gave {pipe.num_stages} stages; "
            f"expected {len(points) + 1}: name modules that each forward pass calls exactly once, after its first "
            "operation"
        )
    return pipe


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
                    f"prepare_pippy: split_points has {name!r}, but {type(model).__name__} has no such module"
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


def _in_one_piece(traced: fx.GraphModule) -> fx.GraphModule:
    """Copies values that are not contiguous, such as expanded ones, if later stages need them: processes can only send
    contiguous ones.
    """
    stage, stage_of = 0, {}
    for node in traced.graph.nodes:
        stage_of[node] = stage
        stage += node.target is torch.ops.pippy._pipe_split.default
    for node in list(traced.graph.nodes):
        value = node.meta.get("val")
        later = [user for user in node.users if stage_of[user] > stage_of[node]]
        if node.op == "call_function" and later and isinstance(value, Tensor) and not value.is_contiguous():
            with traced.graph.inserting_after(node):
                options: dict[str, Any] = {"memory_format": torch.contiguous_format}
                copied = traced.graph.call_function(torch.ops.aten.clone.default, (node,), options)
            copied.meta = {**node.meta, "val": value.contiguous()}
            for user in later:
                user.replace_input_with(node, copied)
    traced.recompile()
    return traced
