"""Cells of a notebook: what IPython calls them, and an error that a cell shows without frames of this package."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

from accelerate_cpp.config import env_table
from accelerate_cpp.launch.workers.failure import WorkerFailed

_FRAME = re.compile(r'File "([^"]+)", (line \d+)')


def place(filename: str, line: int) -> str:
    """``Cell In[3], line 2`` for the code of a cell, ``File "train.py", line 2`` for that of a file."""
    return in_cells(f'File "{filename}", line {line}')


def in_cells(traceback: str) -> str:
    """``traceback`` with the names of cells in place of those of the files that IPython makes up for them."""
    name_of = getattr(getattr(shell(), "compile", None), "format_code_name", None)
    if name_of is None:
        return traceback

    def rename(frame: re.Match[str]) -> str:
        name = name_of(frame[1])
        return frame[0] if name is None else f"{' '.join(name)}, {frame[2]}"

    return _FRAME.sub(rename, traceback)


def shell() -> Any:
    """IPython's shell, if this process is one."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def cell_display() -> Callable[[str, str], object] | None:
    """What shows a text, or the same as HTML, in the running cell, in the place of what it has shown before.

    ``None`` where there is no cell that can show it, and where ACCELERATE_CPP_LIVE_VIEW is off.
    """
    if not hasattr(shell(), "kernel") or not env_table.LIVE_VIEW.get():
        return None
    display: Any = importlib.import_module("IPython.display").display
    handles: list[Any] = []

    def show(text: str, page: str) -> None:
        data = {"text/plain": text, "text/html": page}
        if handles:
            handles[0].update(data, raw=True)
        else:
            handles.append(display(data, raw=True, display_id=True))

    return show


class FunctionFailed(WorkerFailed):
    """The :class:`WorkerFailed` of a launched function; IPython shows only its message, the worker's traceback."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the frames of this process."""
        return in_cells(str(self)).splitlines()
