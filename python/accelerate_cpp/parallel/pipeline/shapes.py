"""What passes between stages: shapes and dtypes, which ranks have to know before they receive.

They are found by computing a part of the first batch of its shape, without gradients and with modules in evaluation, so
that statistics such as those of batch norms stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.evaluating import evaluating
from accelerate_cpp.parallel.pipeline.peers import global_rank

__all__ = ["Passed", "described", "like", "passed_between", "with_rows_of"]

Passed = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shapes and dtypes of the tensors that one stage gives to the next."""


def described(tensors: Sequence[Tensor]) -> Passed:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def like(passed: Passed, with_gradients: bool = True) -> tuple[Tensor, ...]:
    """Tensors without memory. Gradients pass through all that can have one, whether or not anything needs them."""
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta", requires_grad=with_gradients and dtype.is_floating_point)
        for shape, dtype in passed
    )


def with_rows_of(passed: Passed, inputs: Passed) -> Passed:
    """``passed`` with the first two dimensions of ``inputs``."""
    leading = inputs[0][0][:2]
    return tuple(((*leading, *shape[2:]), dtype) for shape, dtype in passed)


def passed_between(
    stages: Mapping[int, nn.Module],
    ranks: Sequence[int],
    group: dist.ProcessGroup | None,
    device: torch.device,
    inputs: tuple[Tensor, ...],
    kwargs: Mapping[str, Any],
) -> list[Passed]:
    """What each stage returns, on all ranks of the group, which all call this.

    Args:
        stages: those of this rank by their number.
        ranks: for each stage its rank in the group.
        inputs: of the first stage, for one part of a batch.
        kwargs: of all stages.

    Raises:
        InvalidArgument: on all ranks, if a stage returns anything but tensors. On ranks other than that of a stage
            that raised, its message; that rank raises what it raised.
    """
    found: list[Passed] = []
    for number, rank in enumerate(ranks):
        said: list[Any] = [None]
        failure: BaseException | None = None
        if number in stages:
            given = inputs if number == 0 else tuple(torch.zeros(s, dtype=d, device=device) for s, d in found[-1])
            try:
                said = [_result(number, stages[number], given, kwargs)]
            except Exception as error:
                failure = error
                said = [
                    f"pipeline: stage {number} on rank {rank} raised {type(error).__name__}: {shorten(str(error), 300)}"
                ]
        dist.broadcast_object_list(said, global_rank(rank, group), group)
        if failure is not None:
            raise failure
        if isinstance(said[0], str):
            raise InvalidArgument(said[0])
        found.append(said[0])
    return found


def _result(number: int, stage: nn.Module, inputs: tuple[Tensor, ...], kwargs: Mapping[str, Any]) -> Passed:
    with evaluating(stage), torch.no_grad():
        outputs = stage(*inputs, **kwargs)
    if torch.is_autocast_enabled(inputs[0].device.type):
        torch.clear_autocast_cache()  # its copies of weights have no gradients
    tensors = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    if not tensors or not all(isinstance(value, Tensor) for value in tensors):
        raise InvalidArgument(
            f"pipeline: stage {number} returns {type(outputs).__name__}; expected a tensor or a tuple of tensors, "
            "which can be sent; cut the model elsewhere with split_points"
        )
    return described(tensors)
