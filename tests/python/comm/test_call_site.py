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
import torch

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
    def _library() -> str:
        return call_site()

    assert within(module, _library)() == f"{os.path.relpath(__file__)}:{line_here()}"  # type: ignore[arg-type]


def called_in(module: str, name: str, *arguments: Any) -> str:
    """What the call of a function of ``module`` with this name is called."""
    names: dict[str, Any] = {"call_site": call_site, "__name__": module}
    exec(f"def {name}(self, tensor=None, scale=1):\n    return call_site()", names)
    site: str = names[name](None, *arguments)
    called, _, place = site.rpartition("\t")
    assert place == f"{os.path.relpath(__file__)}:{line_here() - 2}"
    return called


def test_what_the_user_called_of_this_package_is_named_with_its_operand() -> None:
    tensor, whole = torch.ones(2), torch.zeros(3, 1, dtype=torch.int64)
    own = "accelerate_cpp.accelerator"
    assert called_in(own, "gather", tensor) == "gather of a float32 tensor of shape (2,)"
    assert called_in(own, "gather", [tensor, whole]) == "gather of 2 tensors: float32 (2,), int64 (3, 1)"
    assert called_in(own, "gather", whole) == "gather of an int64 tensor of shape (3, 1)"
    assert called_in(own, "gather", [tensor]) == "gather of a float32 tensor of shape (2,)"
    assert called_in(own, "gather", (tensor,) * 4).endswith("float32 (2,), float32 (2,), …")
    assert called_in(own, "reduce", {"a": tensor}) == "reduce of dict"
    assert called_in(own, "save_state", "folder") == "save_state"
    assert called_in(own, "wait_for_everyone") == "wait_for_everyone"


@pytest.mark.parametrize("name", ["backward", "forward", "step"])
def test_what_hides_its_communication_has_the_name_of_the_operation(name: str) -> None:
    assert called_in("accelerate_cpp.accelerator", name, torch.ones(2)) == ""


def test_a_loop_over_a_prepared_loader_is_named() -> None:
    class Loader:
        def __iter__(self) -> Iterator[str]:
            yield call_site()

    Loader.__iter__ = within("accelerate_cpp.prepare.tracked_loader", Loader.__iter__)  # type: ignore[assignment, arg-type, method-assign]
    for found in Loader():
        assert found.partition("\t")[0] == "the next batch of a prepared loader"
        break
    else:
        pytest.fail("nothing was read")


def test_operations_of_torch_and_watchers_of_a_check_have_no_name_of_their_own() -> None:
    assert called_in("torch.distributed.distributed_c10d", "all_reduce", torch.ones(2)) == ""
    assert called_in("accelerate_cpp.check.watch", "watched", torch.ones(2)) == ""


def test_the_outermost_call_is_named() -> None:
    def gather(tensor: Any) -> str:
        return within("accelerate_cpp.comm.gather", all_gather)(tensor)  # type: ignore[no-any-return, arg-type]

    def all_gather(tensors: Any) -> str:
        return call_site()

    assert within("accelerate_cpp.accelerator", gather)([]).startswith("gather of list\t")  # type: ignore[arg-type]


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
