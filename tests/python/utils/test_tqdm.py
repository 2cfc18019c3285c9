"""Progress bars of one process of each machine."""

from __future__ import annotations

import inspect
import io
import subprocess
import sys

import accelerate.utils
import pytest

import accelerate_cpp.utils
from accelerate_cpp import PartialState, debug_launcher
from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.runtime import current
from accelerate_cpp.utils import tqdm


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "session", None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_a_bar_counts_what_it_hands_on() -> None:
    screen = io.StringIO()
    assert list(tqdm(range(3), desc="steps", file=screen)) == [0, 1, 2]
    assert "steps: 100%" in screen.getvalue()
    assert "3/3" in screen.getvalue()


@pytest.mark.parametrize(
    ("local_rank", "arguments", "hidden"),
    [
        ("0", {}, False),
        ("1", {}, True),
        ("1", {"main_process_only": False}, False),
        ("0", {"disable": True}, True),
        ("1", {"disable": True, "main_process_only": False}, True),
        ("1", {"disable": False}, True),
    ],
)
def test_the_main_process_of_a_machine_shows_the_bar(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, arguments: dict[str, bool], hidden: bool
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    screen = io.StringIO()
    assert list(tqdm(range(3), file=screen, **arguments)) == [0, 1, 2]
    assert (screen.getvalue() == "") is hidden
    assert current.session is None


def _shown() -> tuple[bool, bool]:
    PartialState()
    return bool(tqdm(range(3)).disable), bool(tqdm(range(3), main_process_only=False).disable)


def test_workers_of_a_launch_know_who_shows_it() -> None:
    assert debug_launcher(_shown, num_processes=2) == [(False, False), (True, False)]


@pytest.mark.parametrize("first", [True, False])
def test_whether_to_show_it_is_no_first_argument(first: bool) -> None:
    with pytest.raises(InvalidArgument, match=f"pass main_process_only={first} by keyword"):
        tqdm(first, range(3))
    with pytest.raises(ValueError, match="unsupported"):
        accelerate.utils.tqdm(first, range(3))


def test_the_signature_is_the_originals() -> None:
    def shape(function: object) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert shape(tqdm) == shape(accelerate.utils.tqdm)


def test_the_library_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(MissingLibrary, match="pip install tqdm"):
        tqdm(range(3))


def test_the_package_has_the_function_whatever_is_imported_first() -> None:
    script = (
        "from accelerate_cpp.utils.tqdm import tqdm as a; from accelerate_cpp.utils import tqdm as b; print(a is b, b)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("True <function tqdm")
    assert "tqdm" in accelerate_cpp.utils.__all__
