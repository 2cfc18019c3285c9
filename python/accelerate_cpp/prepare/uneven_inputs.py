"""Training on processes that have different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from accelerate_cpp.comm.states import broadcast_state
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.parallel.compilation import inside_compiler
from accelerate_cpp.parallel.data_parallel import DataParallel
from accelerate_cpp.parallel.strategy import Strategy
from accelerate_cpp.runtime import current
from accelerate_cpp.runtime.reading import OnUneven

__all__ = ["uneven_inputs"]

# Attributes of prepared optimizers and schedules that steps change and states do not have.
_NOT_IN_STATES = ("_is_overflow", "_due")


@contextmanager
def uneven_inputs(
    strategy: Strategy, joinables: list[Any], mode: OnUneven, accumulates: bool, stateful: Callable[[], Iterable[Any]]
) -> Iterator[None]:
    """Inside this block, processes that have more batches than others do what ``mode`` says.

    Args:
        joinables: the prepared models that are trained.
        mode: as ``Accelerator.join_uneven_inputs`` takes it.
        accumulates: whether a step has several backward passes.
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
    repeats = mode == "join" and (accumulates or strategy.needs_all_ranks(joinables))
    joins = mode == "join" and not repeats
    modules = [one for one in joinables if isinstance(one, torch.nn.Module)]
    joining = [one for one in map(inside_compiler, modules) if joins and isinstance(one, DataParallel)]
    buffers = [_Buffers(model) for model in modules] if repeats else []
    guards = [guard for model in modules for guard in _guards(model)] if repeats else []
    guards += [handle for one in buffers for handle in one.handles]
    try:
        # Ranks that repeat a batch take part in everything, and their gradients weigh nothing.
        with strategy.join(joinables, partial(_hand_over, stateful)) if joins else nullcontext():
            reading.weighs_rows, reading.repeats = repeats or bool(joining), repeats
            for model in joining:
                model.joining = reading
            yield
        for one in buffers:
            one.spread()
    finally:
        reading.on_uneven, reading.weighs_rows, reading.repeats = before, False, False
        reading.share, reading.first_with_batch = None, 0
        for model in joining:
            model.joining = None
        for guard in guards:
            guard.remove()


class _Buffers:
    """The buffers of a model, as those of normalisations, while processes repeat batches, which leave no trace there.

    Each process has those of the first one that had a batch of its own when the model was last trained. Wrappers do so
    if that is the first process of all.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._source = 0
        self._kept: list[torch.Tensor] = []
        self.handles = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]

    def spread(self) -> None:
        """Gives the buffers to all processes, where they are to be equal. Collective."""
        inner = inside_compiler(self._model)
        if self._source > 0 and isinstance(inner, DistributedDataParallel) and inner.broadcast_buffers:
            for buffer in inner.module.buffers():
                dist.broadcast(buffer.data, self._source)

    def _before_forward(self, *_: Any) -> None:
        self._kept.clear()
        self.spread()
        if self._model.training and torch.is_grad_enabled():
            reading = current.accumulation.reading
            self._source = reading.first_with_batch
            if reading.repeated:
                self._kept.extend(buffer.detach().clone() for buffer in self._model.buffers())

    def _after_forward(self, *_: Any) -> None:
        for buffer, value in zip(self._model.buffers(), self._kept, strict=False):
            buffer.data.copy_(value)  # which autograd does not count as a change
        self._kept.clear()


def _hand_over(stateful: Callable[[], Iterable[Any]], source: int, is_last: bool) -> None:
    """Gives the states of rank ``source`` to the ranks that are not among the last that trained. Collective."""
    for one in stateful():
        also = {name: vars(one)[name] for name in _NOT_IN_STATES if name in vars(one)}
        try:
            state, also = broadcast_state((one.state_dict(), also), source)
        except InvalidArgument as error:
            warnings.warn(
                f"join_uneven_inputs: the state of {type(one).__name__} is not handed on to processes that ran out of "
                f"batches before others, as it is {error}",
                stacklevel=2,
            )
            continue
        if not is_last:
            one.load_state_dict(state)
            vars(one).update(also)


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
        # A pass to some tensors only, as that of a gradient penalty, gives no parameter a gradient.
        whole = torch.autograd.Variable._execution_engine.is_checkpoint_valid()
        if whole and not current.accumulation.weights.is_weighing:
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
