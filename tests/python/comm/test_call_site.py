"""The place in the user's program."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from accelerate_cpp.comm.call_site import call_site


def line_here() -> int:
    return sys._getframe(1).f_lineno


def within(module: str, function: FunctionType) -> Any:
    """``function`` as if it stood in ``module``."""
    return FunctionType(function.__code__, {**function.__globals__, "__name__": module}, closure=function.__closure__)


def test_it_is_the_line_that_calls() -> None:
    assert call_site() == f"{os.path.relpath(__file__)}:{line_here()}"


@pytest.mark.parametrize("module", ["torch.distributed.distributed_c10d", "accelerate_cpp.state", "torch", "threading"])
def test_code_of_torch_and_of_this_package_is_left_out(module: str) -> None:
    def library() -> str:
        return call_site()

    assert within(module, library)() == f"{os.path.relpath(__file__)}:{line_here()}"  # type: ignore[arg-type]


def test_a_module_with_a_similar_name_is_the_users() -> None:
    def users() -> tuple[str, int]:
        return call_site(), line_here()

    place, line = within("torchvision", users)()  # type: ignore[arg-type]
    assert place.endswith(f":{line}")


def test_decorators_and_context_managers_of_torch_do_not_hide_the_user() -> None:
    places = []

    def record() -> Iterator[None]:
        places.append(call_site())
        yield

    torchs = contextlib.contextmanager(within("torch.some", record))  # type: ignore[arg-type]
    with torchs():
        line = line_here() - 1
    assert places == [f"{os.path.relpath(__file__)}:{line}"]
    assert functools.partial(call_site)().endswith(f":{line_here()}")


def test_a_file_outside_the_working_directory_keeps_its_full_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call_site() == f"{__file__}:{line_here()}"


def test_a_working_directory_that_is_gone_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert call_site().startswith(__file__)


def test_a_thread_that_runs_nothing_of_the_user_has_no_place() -> None:
    places = []

    def library() -> None:
        places.append(call_site())

    thread = threading.Thread(target=within("torch.worker", library))  # type: ignore[arg-type]
    thread.start()
    thread.join()
    assert places == [""]


def test_finding_it_loads_no_torch() -> None:
    script = "import sys; from accelerate_cpp.comm.call_site import call_site; print(call_site(), *sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()
    assert printed[0] == "<string>:1"
    assert "torch" not in printed
