"""The scripts by which an installation is tried out, in two real processes, under the names of the original."""

from __future__ import annotations

import pytest

from processes import run_processes


def run_script(name: str) -> None:
    import importlib

    importlib.import_module(f"accelerate_cpp.test_utils.scripts.{name}").main()


@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script", "external_deps.test_metrics"])
def test_two_processes_pass(name: str) -> None:
    assert run_processes(run_script, 2, name) == [None, None]
