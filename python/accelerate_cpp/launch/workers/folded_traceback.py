"""The traceback of an exception as a user reads it: the frames of the program, without those of this package."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import TracebackType

from accelerate_cpp.errors import AccelerateError, InternalError

_FRAME = re.compile(r'[ |]*File "([^"]+)", line \d+, in ')
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
# The modules behind decorators and context managers, through which this package and torch call the program.
_PLUMBING = {contextlib.__file__, functools.__file__}


def folded_traceback(error: BaseException, frames: TracebackType | None = None, whole: bool = False) -> str:
    """The text that Python shows of ``error``, with one line in the place of frames between those of the program.

    A line replaces what lies between two frames of the program if this package is in it, and the frames from the
    program into this package where it raised. Frames of other libraries that raised the error are kept, unless it is
    one of this package, raised in C++ that torch called. Nothing is left out of an :class:`InternalError`, nor of a
    traceback that has no frame of the program.

    Args:
        frames: where the traceback begins; ``None`` is where ``error`` was caught.
        whole: leave nothing out.
    """
    begin = error.__traceback__ if frames is None else frames
    chunks = list(traceback.TracebackException(type(error), error, begin).format())
    if whole or isinstance(error, InternalError):
        return "".join(chunks).rstrip("\n")
    folded: list[str] = []
    for is_stack, group in groupby(chunks, key=_belongs_to_stack):
        stack = list(group)
        folded += _folded(stack, isinstance(error, AccelerateError)) if is_stack else stack
    return "".join(folded).rstrip("\n")


def _belongs_to_stack(chunk: str) -> bool:
    return _FRAME.match(chunk) is not None or chunk.lstrip(" |").startswith("[Previous line repeated ")


def _folded(stack: Sequence[str], is_ours: bool) -> Iterator[str]:
    """One stack, of which each element shows a frame, or says how often the one before is repeated.

    Args:
        is_ours: its error is this package's.
    """
    kinds = [_kind(chunk) for chunk in stack]
    if "program" not in kinds:
        yield from stack
        return
    runs = [list(run) for _, run in groupby(range(len(stack)), key=lambda index: kinds[index] == "program")]
    for run in runs:
        own = [index for index in run if kinds[index] == "own"]
        if not own:
            yield from (stack[index] for index in run)
            continue
        raised_by_library = run[-1] == len(stack) - 1 and not is_ours
        rest = [index for index in run if index > own[-1]] if raised_by_library else []
        indent = stack[run[0]][: len(stack[run[0]]) - len(stack[run[0]].lstrip(" |"))]
        left_out = len(run) - len(rest)
        yield f"{indent}[{left_out} frame{'s' * (left_out > 1)} of accelerate_cpp, shown with --debug]\n"
        yield from (stack[index] for index in rest)


def _kind(chunk: str) -> str:
    """``own`` for a frame of this package, ``library`` for one of torch or between, else ``program``."""
    frame = _FRAME.match(chunk)
    if frame is None:  # it goes with the frame before, whichever that is
        return "library"
    file = frame[1]
    if file.startswith(_OWN):
        return "own"
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if file in _PLUMBING or (torch is not None and file.startswith(os.path.dirname(torch) + os.sep)):
        return "library"
    return "program"
