"""Importing this module shows the tracebacks of uncaught exceptions through rich.

Importing ``accelerate_cpp`` does so if ``ACCELERATE_ENABLE_RICH`` is set and rich is installed. It does not change the
exit status of a program: an uncaught exception is a failure.
"""

from __future__ import annotations

import importlib

from accelerate_cpp.errors import MissingLibrary
from accelerate_cpp.utils.imports import is_rich_available

__all__: list[str] = []

if not is_rich_available():
    raise MissingLibrary(
        "accelerate_cpp.utils.rich: expected ACCELERATE_ENABLE_RICH=1 in the environment and the library rich; set the "
        "variable, and install the library: pip install rich"
    )
importlib.import_module("rich.traceback").install(show_locals=False)
