"""For all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
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


def _end_zygotes() -> None:
    """Ends the processes from which those of tests are forked, if there are any."""
    if rank_process := sys.modules.get("rank_process"):
        rank_process.end_zygotes()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Zygotes serve the tests of all folders but ``tests/python``, where the children of the process are counted."""
    if Path(__file__).parent / "python" in item.path.parents:
        _end_zygotes()


def pytest_sessionfinish() -> None:
    _end_zygotes()


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of a launch is set, and there is no state of an ``Accelerator``, nor will there be afterwards."""
    from accelerate_cpp.state import AcceleratorState, GradientState

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    reset()
    yield
    reset()


@pytest.fixture
def fresh_states(fresh_state: None) -> Iterator[None]:
    """The same of both packages: nor is there a state of the original's ``Accelerator`` afterwards."""
    import accelerate

    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n 3``, one process runs ``tests/python`` and the others the files beside it; then all take what is left.

    The tests of one folder or file stay together and in order.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/python" if nodeid.startswith("tests/python/") else nodeid.split("::", 1)[0]

    return ByFile(config, log)
