"""Places in the user's program, and the lengths of the loops around them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.check.source import here, is_the_users, place_of_error, repetitions, user_frame


def run(folder: Path, text: str, **names: Any) -> None:
    """Runs ``text`` as a file of the user's."""
    path = folder / "script.py"
    path.write_text(text)
    exec(compile(text, str(path), "exec"), names)


def test_the_code_of_python_and_of_this_package_is_not_the_users() -> None:
    assert is_the_users(test_the_code_of_python_and_of_this_package_is_not_the_users.__code__)
    assert not is_the_users(json.dumps.__code__)
    assert not is_the_users(here.__code__)


def test_the_place_is_the_line_of_the_user_who_calls_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []

    class Tells(dict[str, str]):
        def items(self) -> Any:
            seen.append(here())
            return super().items()

    run(tmp_path, "\nfunction(tells)\n", function=lambda _: seen.append(here()), tells=Tells())
    assert seen[0].startswith(str(Path(__file__))) or "test_source.py" in seen[0]
    with pytest.raises(ZeroDivisionError) as raised:
        run(tmp_path, "\n\n1 / 0\n")
    assert place_of_error(raised.value.__traceback__) == "script.py:3"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("for epoch in range(3):\n    for batch in batches:\n        pass\n", 3),
        ("n = 4\nfor epoch in range(1, n + 1):\n    for batch in batches:\n        pass\n", 4),
        ("class A: epochs = 5\nfor e in list(range(A.epochs)):\n    for batch in batches: pass\n", 5),
        ("def one():\n    for batch in batches:\n        pass\nfor e in range(6):\n    one()\n", 6),
        ("c = {'epochs': 7}\nfor e in range(int(c['epochs'])):\n    for batch in enumerate(batches): pass\n", 7),
        ("while True:\n    for batch in batches: pass\n    break\n", None),
        ("for name in ['a', 'b']:\n    for batch in batches: pass\n", None),
        ("for e in range(9):\n    for batch in batches:\n        pass\n    break\n", None),
        ("for batch in batches: pass\n", None),
        ("unread = iter(batches)\nfor step in range(1):\n    next(unread)\n", None),
    ],
)
def test_a_range_around_the_loop_says_how_often_it_runs(tmp_path: Path, script: str, expected: int | None) -> None:
    lengths: list[int | None] = []

    class Batches:
        def __iter__(self) -> Any:
            lengths.append(repetitions(caller()))
            yield 1

    def caller() -> Any:
        frame: Any = sys._getframe(2)
        while not frame.f_code.co_filename.endswith("script.py"):
            frame = frame.f_back
        return frame

    run(tmp_path, script, batches=Batches())
    assert lengths[0] == expected


def test_the_frame_of_the_user_is_the_innermost_one_of_theirs() -> None:
    frame = user_frame()
    assert frame is not None
    assert frame.f_code.co_filename == __file__
