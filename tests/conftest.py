"""For all tests."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest

# Tests send Ctrl-C to programs, which would not hear it where a shell has started the tests in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Unbuffered, a print is several writes, and those of two workers mix.
os.environ.pop("PYTHONUNBUFFERED", None)


def pytest_collection_finish() -> None:
    """Spares the collector all that has been made so far: it takes most of a second to look at that each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n 2``, one process runs ``tests/python`` and the other the files beside it; then both take what is left.

    The tests of one folder or file stay together and in order.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/python" if nodeid.startswith("tests/python/") else nodeid.split("::", 1)[0]

    return ByFile(config, log)
