"""Training on processes that have different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch.utils._pytree import tree_leaves

from accelerate_cpp.comm.states import broadcast_state
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.strategy import Strategy
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.reading import OnUneven

__all__ = ["uneven_inputs"]


@contextmanager
def uneven_inputs(
    strategy: Strategy, joinables: list[Any], mode: OnUneven, stateful: Callable[[], Iterable[Any]]
) -> Iterator[None]:
    """Inside this block, processes that have more batches than others do what ``mode`` says.

    Args:
        joinables: the prepared models that are trained.
        mode: as ``Accelerator.join_uneven_inputs`` takes it.
        stateful: returns what has a state that steps change, such as optimizers and schedules. Processes that ran out
            of batches get the states of one that trained to the end, as they get its weights.

    Raises:
        InvalidArgument: ``mode`` is not one of those.
    """
    reading = current.accumulation.reading
    if mode not in get_args(OnUneven):
        raise InvalidArgument(f"mode={mode!r}: expected one of {', '.join(map(repr, get_args(OnUneven)))}")
    if mode == "join" and not strategy.can_join:
        warnings.warn(
            "join_uneven_inputs: DeepSpeed, and models in stages, need all processes in each backward pass, so those "
            "with batches cannot go on without the others; where batches run out on one, this raises an error",
            stacklevel=4,
        )
        mode = "error"
    before, reading.on_uneven = reading.on_uneven, mode
    # Of several backward passes of a step, which is the last depends on what all processes have left.
    accumulates = current.accumulation.num_steps > 1
    repeats = mode == "join" and (accumulates or strategy.needs_all_ranks(joinables))
    guards = [guard for model in joinables for guard in _guards(model)] if repeats else []
    try:
        joins = mode == "join" and not repeats
        # Ranks that repeat a batch take part in everything, and their gradients weigh nothing.
        joined = strategy.join(joinables, partial(_hand_over, stateful)) if joins else nullcontext(repeats)
        with joined as weighs:
            reading.weighs_rows, reading.repeats = weighs, repeats
            yield
    finally:
        reading.on_uneven, reading.weighs_rows, reading.repeats = before, False, False
        for guard in guards:
            guard.remove()


def _hand_over(stateful: Callable[[], Iterable[Any]], source: int, is_last: bool) -> None:
    """Gives the states of rank ``source`` to the ranks that are not among the last that trained. Collective."""
    for one in stateful():
        state = broadcast_state(one.state_dict(), source)
        if not is_last:
            one.load_state_dict(state)


def _guards(model: torch.nn.Module) -> list[Any]:
    """Raise in a loop in which processes without batches would count as if they had some, or not know to go on.

    Returns:
        Handles of hooks.
    """

    def before_forward(*_: Any) -> None:
        if torch.is_grad_enabled() and current.accumulation.reading.active_loader is None:
            raise InvalidArgument(
                "join_uneven_inputs: with sharded parameters or gradient accumulation, a process without batches has "
                "to train on with the others, but the loop reads no prepared loader, which repeats its last batch "
                "there; pass the loader to prepare, or use mode='stop'"
            )

    def before_backward(_: torch.Tensor) -> None:
        if not current.accumulation.weights.is_weighing:
            raise InvalidArgument(
                "join_uneven_inputs: with sharded parameters or gradient accumulation, processes without batches "
                "repeat their last one, which accelerator.backward(loss) leaves out, but loss.backward() does not; "
                "call accelerator.backward"
            )

    def after_forward(_: Any, __: Any, output: Any) -> None:
        for one in tree_leaves(output):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(before_backward)

    return [model.register_forward_pre_hook(before_forward), model.register_forward_hook(after_forward)]
