"""Where in the user's program an operation was called. C++ calls this, to name places in reports and errors."""

from __future__ import annotations

import os
import sys

# Code between the user's and ours: torch itself, and the modules behind its decorators and context managers.
_BETWEEN = frozenset(
    {"accelerate_cpp", "contextlib", "functools", "importlib", "threading", "torch", "typing_extensions", "warnings"}
)


def call_site() -> str:
    """``"file.py:line"`` of the innermost frame of this thread that is neither torch's nor this package's.

    The file is relative to the working directory if it is below that. Empty when there is no such frame, as in threads
    that run nothing but torch.
    """
    frame = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{_shortened(frame.f_code.co_filename)}:{frame.f_lineno}"


def _shortened(filename: str) -> str:
    try:
        folder = os.getcwd() + os.sep
    except OSError:  # the working directory has been removed
        return filename
    return filename.removeprefix(folder)
