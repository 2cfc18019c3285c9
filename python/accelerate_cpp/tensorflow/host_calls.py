"""Calls of Python functions on the memory of tensors: at once, or from the graph of a ``tf.function``.

A graph calls them as stateful operations, which TensorFlow executes in the order of the program, so that several
collectives of one graph are carried out in the same order on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

import tensorflow as tf
import torch

from accelerate_cpp.comm.call_site import call_site
from accelerate_cpp.tensorflow.memory import to_tensorflow, to_torch

HostFunction = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def as_written(function: _Function) -> _Function:
    """``function``, which ``tf.function`` calls while it makes a graph, and does not rewrite for it."""
    return cast(_Function, tf.autograph.experimental.do_not_convert(function))


def host_call(function: HostFunction, inputs: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """``function`` on tensors of TensorFlow: now, or in a graph whenever that is run.

    Args:
        function: gets views of the inputs, which it may not write to, and gives new tensors.
        inputs: of any dtypes that torch has, too.
        results: a ``tf.TensorSpec`` for each result; shapes may have unknown dimensions.
    """
    if tf.executing_eagerly():
        return [to_tensorflow(result) for result in function([to_torch(value) for value in inputs])]

    def _from_graph(*values: Any) -> list[Any]:
        try:
            return [to_tensorflow(result) for result in function([to_torch(value) for value in values])]
        except Exception as error:
            _to_be_shown(error)
            raise

    called = _called_at(call_site().rpartition("\t")[2], _from_graph)
    outputs = tf.py_function(called, list(inputs), [result.dtype for result in results])
    for output, result in zip(outputs if results else [], results, strict=True):
        output.set_shape(result.shape)
    return list(outputs) if results else []


def _called_at(place: str, function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``function``, called from a frame at ``place``, ``file:line``: errors of collectives show the innermost one.

    The thread that runs a graph has no frame of the program, so this stands for the one that made the graph.
    """
    file, _, line = place.rpartition(":")
    if not file:
        return function
    call = compile("\n" * (int(line) - 1) + "function(*values)", file, "eval")
    return lambda *values: cast(list[Any], eval(call, {"__name__": "", "function": function, "values": values}))


_last_error: Exception | None = None


def _to_be_shown(error: Exception) -> None:
    """Shows ``error``, should TensorFlow's own, which has but its text, end the program.

    So the launcher sees which rank it blames.
    """
    global _last_error
    if _last_error is None:
        shown = sys.excepthook

        def hook(kind: type[BaseException], raised: BaseException, frames: TracebackType | None) -> None:
            if isinstance(raised, tf.errors.OpError) and _last_error is not None and str(_last_error) in str(raised):
                shown(type(_last_error), _last_error.with_traceback(None), frames)
            else:
                shown(kind, raised, frames)

        sys.excepthook = hook
    _last_error = error
