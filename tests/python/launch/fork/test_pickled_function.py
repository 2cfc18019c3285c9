from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.fork.pickle_files import packed, read
from accelerate_cpp.launch.fork.pickled_function import ShippedTask, Surroundings, TaskPickler, refusal

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def all_is_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    folder = os.getcwd()
    yield
    os.chdir(folder)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A ``__main__`` with the code of one cell."""
    module = ModuleType("__main__")
    cell = "class Net:\n    pass\ndef build():\n    return Net()\ndef fail():\n    raise ValueError('boom')\n"
    lines = cell.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "/tmp/ipykernel_1/2.py", (len(cell), None, lines, "/tmp/ipykernel_1/2.py"))
    exec(compile(cell, "/tmp/ipykernel_1/2.py", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def _run(task: Callable[[], Any], **surroundings: Any) -> Any:
    """Runs it as a worker of the fork server does, whose ``__main__`` is another one."""
    with packed(task, TaskPickler()) as file:
        sys.modules["__main__"] = ModuleType("__main__")
        return ShippedTask(file, Surroundings(**{**vars(Surroundings.here()), **surroundings}))()


def test_code_of_cells_runs_in_a_program_that_does_not_have_it(notebook: ModuleType) -> None:
    made = _run(notebook.build)
    assert type(made).__name__ == "Net"
    assert type(made) is sys.modules["__main__"].Net  # so that the worker can pickle it by name


def test_traceback_shows_the_lines_of_cells(notebook: ModuleType) -> None:
    with packed(notebook.fail, TaskPickler()) as file:
        del linecache.cache["/tmp/ipykernel_1/2.py"]
        with pytest.raises(ValueError, match="boom") as failure:
            ShippedTask(file, Surroundings.here())()
    assert "raise ValueError('boom')" in "".join(traceback.format_exception(failure.value))


def test_folder_path_and_arguments_are_those_of_the_sender(tmp_path: Any) -> None:
    (tmp_path / "in_the_folder.py").write_text("VALUE = 3")

    def task() -> Any:
        import in_the_folder  # type: ignore[import-not-found]

        return os.getcwd(), sys.argv, in_the_folder.VALUE

    found = _run(task, folder=str(tmp_path), search_path=[*sys.path, str(tmp_path)], arguments=["train.py", "--fast"])
    assert found == (str(tmp_path), ["train.py", "--fast"], 3)


def test_random_generators_go_on_where_the_sender_is() -> None:
    numpy = pytest.importorskip("numpy")
    torch.manual_seed(3)
    numpy.random.seed(3)
    here = Surroundings.here()
    expected = torch.rand(2).tolist(), numpy.random.rand()
    torch.manual_seed(4)
    numpy.random.seed(4)
    with packed(here) as file:
        read(file).enter()
    assert (torch.rand(2).tolist(), numpy.random.rand()) == expected


def _refused(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(Exception) as failure:  # noqa: PT011 - pickle raises many types
        _run(lambda: function(*args))
    return str(refusal(function, args, failure.value))


def test_refusal_names_the_variable_that_cannot_be_shipped() -> None:
    def train() -> Any:
        return held

    held = threading.Lock()
    message = _refused(train)
    assert message.startswith(
        "train has to be copied to a helper process, and `held`, which it uses, cannot be pickled"
    )
    assert "create it inside the function" in message


def test_refusal_looks_into_functions_that_are_called() -> None:
    def helper() -> Any:
        return held

    def train() -> Any:
        return helper()

    held = threading.Lock()
    assert "`held`, which it uses," in _refused(train)


def test_refusal_names_the_argument() -> None:
    assert "`args[1]`, which it uses," in _refused(lambda first, second: None, 3, threading.Lock())


def test_tensor_on_an_accelerator_is_refused_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_gpu(self: Any, storage: Any) -> Any:
        return original(self, type("Storage", (), {"device": torch.device("cuda:1")})())

    def train() -> Any:
        return model.weight

    original = TaskPickler.on_host
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(TaskPickler, "on_host", on_gpu)
    assert _refused(train) == (
        "train has to be copied to a helper process, and `model`, which it uses, is or holds a tensor on cuda:1: "
        "move it to the CPU before the launch, or create it inside the function"
    )


def test_refusal_without_a_culprit_says_what_pickle_said() -> None:
    error = refusal(print, (), TypeError("no"))
    assert isinstance(error, InvalidArgument)
    assert "print has to be copied to a helper process, and it cannot be pickled (TypeError: no)" in str(error)
