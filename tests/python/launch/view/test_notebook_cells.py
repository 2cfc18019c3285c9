from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.launch.view.notebook_cells import FunctionFailed, cell_display, in_cells, place

TRACEBACK = 'Traceback (most recent call last):\n  File "/tmp/ipykernel_1/2.py", line 5, in train\n    inner()'


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPython in whose third cell the code of the file above was written."""

    def name_of(filename: str) -> Any:
        return ("Cell", "In[3]") if filename == "/tmp/ipykernel_1/2.py" else None

    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=name_of))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]


@pytest.mark.usefixtures("notebook")
def test_cells_have_the_names_that_ipython_shows() -> None:
    assert in_cells(TRACEBACK) == "Traceback (most recent call last):\n  Cell In[3], line 5, in train\n    inner()"
    assert place("/tmp/ipykernel_1/2.py", 7) == "Cell In[3], line 7"
    assert place("train.py", 7) == 'File "train.py", line 7'


@pytest.mark.parametrize("ipython", [None, SimpleNamespace(get_ipython=lambda: None)])
def test_outside_of_a_notebook_nothing_changes(ipython: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert in_cells(TRACEBACK) == TRACEBACK


@pytest.mark.usefixtures("notebook")
def test_error_is_shown_as_the_workers_traceback_alone() -> None:
    error = FunctionFailed(f"rank 1 failed: ValueError: boom\n\n{TRACEBACK}", 1)
    assert error._render_traceback_() == [
        "rank 1 failed: ValueError: boom",
        "",
        "Traceback (most recent call last):",
        "  Cell In[3], line 5, in train",
        "    inner()",
    ]


def test_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(FunctionFailed("rank 3 failed", 3, -9)))
    assert (str(error), error.rank, error.exit_code) == ("rank 3 failed", 3, -9)


class _Display:
    """Stands for IPython's, and keeps what each handle shows."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def __call__(self, data: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.shown.append(data)

        def update(newer: dict[str, str], raw: bool) -> None:
            self.shown[-1] = newer

        return SimpleNamespace(update=update)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Display:
    display = _Display()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    return display


def test_cell_shows_the_latest_in_the_place_of_the_older(kernel: _Display) -> None:
    show = cell_display()
    assert show is not None
    assert kernel.shown == []
    show("one", "<p>one</p>")
    show("two", "<p>two</p>")
    assert kernel.shown == [{"text/plain": "two", "text/html": "<p>two</p>"}]


@pytest.mark.usefixtures("kernel")
def test_live_view_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_LIVE_VIEW", "0")
    assert cell_display() is None


@pytest.mark.usefixtures("notebook")
def test_shell_in_a_terminal_has_no_cells_to_show_it_in() -> None:
    assert cell_display() is None
