"""What tests of several folders need."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from accelerate_cpp.config.fp8 import LIBRARIES


@pytest.fixture
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of a launch is set, and afterwards there is no state of an ``Accelerator``."""
    from accelerate_cpp.state import AcceleratorState, GradientState

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def only_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with the names of modules: of the libraries for fp8, these can be found, as empty ones, and no others."""

    def install(*modules: str) -> None:
        for library in LIBRARIES.values():
            if library.module in modules:
                monkeypatch.delitem(sys.modules, library.module, raising=False)
                (tmp_path / library.module).mkdir()
                (tmp_path / library.module / "__init__.py").touch()
            else:
                monkeypatch.setitem(sys.modules, library.module, None)
        monkeypatch.syspath_prepend(tmp_path)

    return install
