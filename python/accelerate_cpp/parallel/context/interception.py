"""How models come to call another attention than torch's, without a change to them.

Models reach ``scaled_dot_product_attention`` in many ways: through ``torch.nn.functional``, by a name imported earlier,
in ``nn.MultiheadAttention``, as an operator of ``torch.ops``, from C++. All end in one operator of torch's dispatcher,
which is overridden for the time of a block; that costs other operators nothing. Compiled models do not, so in
``torch.nn.functional`` it is replaced as well. Attention of other libraries and ``flex_attention`` are not noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import functional

from accelerate_cpp.errors import InvalidArgument

__all__ = ["recomputed_within", "replaced_attention", "saved_as", "torchs_attention"]

Attention = Callable[..., torch.Tensor]
_OPERATOR: Any = torch.ops.aten.scaled_dot_product_attention.default
_attentions: list[Attention] = []  # of the blocks around what is computed now, the innermost last


def torchs_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Torch's own ``scaled_dot_product_attention``, also within :func:`replaced_attention`; not cast by autocast."""
    output: torch.Tensor = _OPERATOR.decompose(*args, **kwargs)
    return output


@contextmanager
def replaced_attention(attention: Attention) -> Iterator[None]:
    """Within the block, calls of torch's ``scaled_dot_product_attention`` are calls of ``attention``, in all threads.

    Blocks can be nested: the innermost one decides. Compiled models call it between two graphs, and are not compiled
    again in the next block.

    Raises:
        InvalidArgument: within the block, ``nn.MultiheadAttention`` is asked for the weights of attention, or a
            compiled model calls attention by another name than that in ``torch.nn.functional``.
    """
    _attentions.append(attention)
    try:
        if len(_attentions) > 1:
            yield
        else:
            with _overridden_operator(), _replaced_functions():
                yield
    finally:
        _attentions.pop()


@contextmanager
def _overridden_operator() -> Iterator[None]:
    devices = {"cpu"} | ({accelerator.type} if (accelerator := torch.accelerator.current_accelerator()) else set())
    keys = [torch._C._dispatch_key_for_device(device) for device in sorted(devices)]
    library = torch.library.Library("aten", "IMPL")
    try:
        for key in keys:
            for prefix in ("", "Autograd"):
                library.impl("scaled_dot_product_attention", _innermost_attention, prefix + key)
        yield
    finally:
        library._destroy()


@contextmanager
def _replaced_functions() -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()  # of encoders in evaluation, which ends in another operator
    before = functional.scaled_dot_product_attention, functional.multi_head_attention_forward
    torch.backends.mha.set_fastpath_enabled(False)
    functional.scaled_dot_product_attention = _untraced_attention()
    functional.multi_head_attention_forward = _multi_head_attention_without_weights
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, functional.multi_head_attention_forward = before
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _innermost_attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(query, FakeTensor):
        raise InvalidArgument(
            "context parallelism cannot be compiled into a graph: let the model call attention as "
            "torch.nn.functional.scaled_dot_product_attention, so that the compiler leaves it out, or do not compile it"
        )
    return _attentions[-1](query, *args, **kwargs)


@functools.cache
def _untraced_attention() -> Attention:
    """One for all blocks, as compiled graphs are guarded by its identity; made late, as it loads the compiler."""
    untraced: Attention = torch.compiler.disable(_innermost_attention)
    return untraced


_multi_head_attention = functional.multi_head_attention_forward


@functools.wraps(_multi_head_attention)
def _multi_head_attention_without_weights(*args: Any, **kwargs: Any) -> Any:
    if kwargs.get("need_weights", True):
        raise InvalidArgument(
            "context parallelism cannot return the weights of nn.MultiheadAttention, whose keys are on other "
            "processes; call it with need_weights=False"
        )
    return _multi_head_attention(*args, **kwargs)


def saved_as(change: Callable[[torch.Tensor], torch.Tensor]) -> AbstractContextManager[Any]:
    """Within the block, autograd saves ``change(tensor)`` for backward passes where it would save ``tensor``.

    Hooks for saved tensors that are active already, as of activation checkpoints and offloading, get what is saved.
    """
    outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if outer is None:
        return torch.autograd.graph.saved_tensors_hooks(change, _unchanged)
    pack, unpack = outer
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: pack(change(tensor)), unpack)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def recomputed_within(resumed: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """What activation checkpoints of this block recompute is computed within ``resumed()``, whenever that is.

    A backward pass after the end of the block so computes again what the block has computed. Covers
    ``torch.utils.checkpoint``, in its reentrant and its other variant, and all that is built on it.
    """
    from torch.utils import checkpoint as module

    checkpoint: Any = module
    frame_init, reentrant = checkpoint._CheckpointFrame.__init__, checkpoint.CheckpointFunction.apply

    def resuming(function: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            with resumed():
                return function(*args, **kwargs)

        return within

    def init(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        frame_init(frame, resuming(recompute_fn), *args, **kwargs)

    def apply(run_function: Callable[..., Any], *args: Any) -> Any:
        return reentrant(resuming(run_function), *args)

    own_apply = checkpoint.CheckpointFunction.__dict__.get("apply")
    checkpoint._CheckpointFrame.__init__ = init
    checkpoint.CheckpointFunction.apply = staticmethod(apply)
    try:
        yield
    finally:
        checkpoint._CheckpointFrame.__init__ = frame_init
        if own_apply is None:
            del checkpoint.CheckpointFunction.apply
        else:
            checkpoint.CheckpointFunction.apply = own_apply
