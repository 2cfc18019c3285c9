"""Importing this module shows the tracebacks of uncaught exceptions through rich.

Importing ``accelerate_cpp`` does it when ``ACCELERATE_ENABLE_RICH`` asks for it and rich is installed. The exit status
of a program is the same with it: an uncaught exception is a failure.
"""

from __future__ import annotations

import importlib

from accelerate_cpp.errors import MissingLibrary
from accelerate_cpp.utils.imports import is_rich_available

__all__: list[str] = []

if not is_rich_available():
    raise MissingLibrary(
        "accelerate_cpp.utils.rich: expected ACCELERATE_ENABLE_RICH=1 in the environment and the library rich; set the "
        "one, and install the other: pip install rich"
    )
importlib.import_module("rich.traceback").install(show_locals=False)
