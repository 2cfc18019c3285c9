"""Calls of Python functions on the memory of tensors: at once, or from the graph of a ``tf.function``.

A graph calls them as stateful operations, which TensorFlow executes in the order of the program, so that several
collectives of one graph are carried out in the same order on all ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, TypeVar, cast

import tensorflow as tf
import torch

from accelerate_cpp.tensorflow.memory import require_numbers, to_tensorflow, to_torch

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

    Raises:
        InvalidArgument: an input is not of numbers or booleans.
    """
    if tf.executing_eagerly():
        return [to_tensorflow(result) for result in function([to_torch(value) for value in inputs])]

    for value in inputs:
        require_numbers(value.dtype)
    call = _GraphCall(function)
    outputs = tf.py_function(call, list(inputs), [result.dtype for result in results])
    call.is_made_by(outputs[0].op if results else outputs)
    for output, result in zip(outputs if results else [], results, strict=True):
        output.set_shape(result.shape)
    return list(outputs) if results else []


_LIBRARIES = tuple(
    f"{Path(spec.origin).parent}{os.sep}"
    for spec in map(find_spec, ("accelerate_cpp", "tensorflow", "keras"))
    if spec is not None and spec.origin is not None
)


class _GraphCall:
    """``function`` as an operation of a graph calls it, in a thread of TensorFlow."""

    def __init__(self, function: HostFunction) -> None:
        self._function = function
        self._code: CodeType | None = None

    def is_made_by(self, operation: Any) -> None:
        """Lets errors of collectives show where the program made ``operation``: they show the innermost frame.

        The thread has no frame of the program, so each call gets one that says so. A traceback of TensorFlow knows the
        lines of functions that it has rewritten.
        """
        made = [frame for frame in operation.traceback if not frame.filename.startswith(_LIBRARIES)]
        if made:
            file, line = made[-1].filename.removeprefix(os.getcwd() + os.sep), made[-1].lineno
            self._code = compile("\n" * (line - 1) + "_call(values)", file, "eval")

    def __call__(self, *values: Any) -> list[Any]:
        if self._code is None:
            return self._call(values)
        results: list[Any] = eval(self._code, {"__name__": "", "_call": self._call, "values": values})
        return results

    def _call(self, values: Sequence[Any]) -> list[Any]:
        try:
            return [to_tensorflow(result) for result in self._function([to_torch(value) for value in values])]
        except Exception as error:
            _to_be_shown(error)
            raise


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
