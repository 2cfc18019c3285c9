"""Pipelined inference: each process runs one stage of a model, and batches pass through the stages in small parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelerate_cpp.alias.borrowed_names import lending
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.pipeline.inference import PipelinedForward
from accelerate_cpp.placement.pipeline_stages import choose_split_points
from accelerate_cpp.state import PartialState
from accelerate_cpp.utils.operations import send_to_device

__all__ = ["prepare_pippy"]

__getattr__ = lending("inference")


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
    it, with the rows of the inputs; the others get ``None``. Nothing is recorded for gradients. Call ``model.eval()``
    before.

    An ``nn.Sequential`` and a decoder of Transformers have the stages with which they are trained (``pp_size``): a
    sequence returns what it returns in one process, a decoder its logits, and batches of other shapes than the example
    pass, too. Other models are traced by ``torch.export`` as they are now, for inputs like the example.

    Args:
        model: on the CPU or the device of this process; the same on all processes. With one process it is returned
            unchanged.
        split_points: names of the modules with which the second to the last stage begin. ``"auto"`` creates stages that
            are about equally expensive: bytes of weights, and again of those with which each token is multiplied.
        no_split_module_classes: names of classes of modules that ``"auto"`` does not split.
        example_args: positional inputs of the size that a stage gets at a time; only shapes and dtypes matter. Larger
            batches are cut into parts with that many rows, or fewer; parts with too few rows are filled up, and what
            is computed for that is removed from the output.
        example_kwargs: named inputs, likewise.
        num_chunks: how many parts are in progress at once; by default one per process.
        gather_output: give the output to all processes.

    Returns:
        ``model``, which has the names of the modules that begin stages as ``hf_split_points``, and the module that this
        process computes as ``pippy_stage``.

    Raises:
        InvalidArgument: there are not as many stages as processes, there is no example with rows, or the model can
            neither be cut nor traced. In a forward pass, on all processes: inputs that the stages do not take; if they
            are traced, inputs that differ from the example in more than their number of rows.

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
    if isinstance(model.__dict__.get("forward"), PipelinedForward):
        del model.forward
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
    if count > 1:
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        example = send_to_device((tuple(example_args or ()), dict(example_kwargs or {})), device)
        run = PipelinedForward(model, points, example, chunks, bool(gather_output), state.device)
        model.__dict__["pippy_stage"] = run.stage  # not one of the modules of the model
        model._original_forward = run.__wrapped__  # type: ignore[assignment]
        model.forward = run
    return model
