"""Where in the user's program an operation was called. C++ calls this, to name places in reports and errors."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

# Code between the user's and ours: libraries, and the modules behind their decorators and context managers.
_BETWEEN = frozenset(
    {"accelerate_cpp", "contextlib", "deepspeed", "functools", "importlib", "jax", "keras", "tensorflow", "threading"}
    | {"torch", "typing_extensions", "warnings"}
)


# Methods of this package that a program calls without knowing that they communicate: the operation says more.
_UNNAMED = frozenset({"backward", "forward", "step"})
# Modules whose operands are not torch's: there, too, the operation says more.
_OF_FRAMEWORKS = ("accelerate_cpp.jax", "accelerate_cpp.keras", "accelerate_cpp.tensorflow")
# What a program calls without a name.
_SPOKEN = {"__iter__": "the next batch of a prepared loader"}
_MOST_SHAPES = 3


def call_site() -> str:
    """``"file.py:line"`` of the innermost frame of this thread that is neither torch's nor this package's.

    If the frame called something of this package, that comes before, with its first argument and a tab:
    ``"gather of a float32 tensor of shape (2,)\\tfile.py:line"``. The file is relative to the working directory if it
    is below that. Empty when there is no such frame, as in threads that run nothing but torch.
    """
    frame = sys._getframe().f_back
    called: FrameType | None = None
    while frame is not None and (package := _package(frame)) in _BETWEEN:
        if package in ("accelerate_cpp", "torch") and not _watches(frame):
            called = frame
        frame = frame.f_back
    if frame is None:
        return ""
    place = f"{_shortened(frame.f_code.co_filename)}:{frame.f_lineno}"
    name = "" if called is None or _package(called) == "torch" else _description(called)
    return f"{name}\t{place}" if name else place


def described(operand: Any) -> str:
    """What messages call an operand: ``a float32 tensor of shape (2,)``, ``2 tensors: …``, or the name of its type."""
    torch = sys.modules.get("torch")
    if torch is None:
        return type(operand).__name__
    if isinstance(operand, torch.Tensor):
        dtype = _dtype(operand)
        return f"a{'n' * dtype.startswith('i')} {dtype} tensor of shape {tuple(operand.shape)}"
    if isinstance(operand, (list, tuple)) and operand and all(isinstance(one, torch.Tensor) for one in operand):
        shown = ", ".join(f"{_dtype(one)} {tuple(one.shape)}" for one in operand[:_MOST_SHAPES])
        rest = ", …" if len(operand) > _MOST_SHAPES else ""
        return described(operand[0]) if len(operand) == 1 else f"{len(operand)} tensors: {shown}{rest}"
    return type(operand).__name__


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return _module(frame).partition(".")[0]


def _watches(frame: FrameType) -> bool:
    """Whether it belongs to ``accelerate-cpp check``, which puts functions of its own before those that are called."""
    return _module(frame).startswith("accelerate_cpp.check.")


def _description(frame: FrameType) -> str:
    """The name of what ``frame`` runs, and its first argument if that is an operand."""
    code = frame.f_code
    if code.co_name in _SPOKEN:
        return _SPOKEN[code.co_name]
    if code.co_name.startswith(("_", "<")) or code.co_name in _UNNAMED or _module(frame).startswith(_OF_FRAMEWORKS):
        return ""
    arguments = code.co_varnames[: code.co_argcount]
    operand = next((frame.f_locals.get(name) for name in arguments if name not in ("self", "cls")), None)
    torch = sys.modules.get("torch")
    is_operand = torch is not None and isinstance(operand, (torch.Tensor, list, tuple, dict))
    return f"{code.co_name} of {described(operand)}" if is_operand else code.co_name


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shortened(filename: str) -> str:
    try:
        folder = os.getcwd() + os.sep
    except OSError:  # the working directory has been removed
        return filename
    return filename.removeprefix(folder)
