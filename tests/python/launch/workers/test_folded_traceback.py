from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accelerate_cpp
from accelerate_cpp.errors import InternalError, MismatchedCollective
from accelerate_cpp.launch.workers.folded_traceback import folded_traceback

PACKAGE = Path(accelerate_cpp.__file__).parent
TORCH = Path(torch.__file__).parent


def _function(name: str, file: object, body: str, **names: Any) -> Callable[..., Any]:
    """A function whose code seems to lie in ``file``."""
    code = compile(f"def {name}():\n{textwrap.indent(body, '    ')}\n", str(file), "exec")
    exec(code, names)
    function: Callable[..., Any] = names[name]
    return function


def _caught(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        return error
    raise AssertionError("nothing was raised")


def _chain(*frames: tuple[str, object], raises: str = "raise ValueError('boom')") -> BaseException:
    """The error of functions that call each other, from the first to the last, which raises."""
    called = _function(*frames[-1], raises)
    for name, file in reversed(frames[:-1]):
        called = _function(name, file, "called()", called=called)
    return _caught(called)


def _shown(text: str) -> list[str]:
    """The frames by name, the lines in the place of others, and the errors, without lines of code."""
    found = re.findall(r'^ *File ".*", line \d+, in (\w+)|^ *(\[.*)|^([^ T].*)', text, re.MULTILINE)
    return [next(filter(None, groups)) for groups in found]


PROGRAM, OWN, LIBRARY = "train.py", PACKAGE / "accelerator.py", TORCH / "_tensor.py"


def test_frames_between_those_of_the_program_become_a_line() -> None:
    error = _chain(("train", PROGRAM), ("forward", OWN), ("call", LIBRARY), ("model", PROGRAM))
    assert _shown(folded_traceback(error)) == [
        "train",
        "[2 frames of accelerate_cpp, shown with --debug]",
        "model",
        "ValueError: boom",
    ]


def test_frames_into_the_package_become_a_line_where_it_raised() -> None:
    error = _chain(("train", PROGRAM), ("prepare", OWN), ("check", OWN))
    assert _shown(folded_traceback(error))[1:-1] == ["[2 frames of accelerate_cpp, shown with --debug]"]
    error = _chain(("train", PROGRAM), ("prepare", OWN))
    assert _shown(folded_traceback(error))[1:-1] == ["[1 frame of accelerate_cpp, shown with --debug]"]


def test_frames_of_a_library_that_raised_stay() -> None:
    error = _chain(("train", PROGRAM), ("backward", OWN), ("backward", OWN), ("tensor", LIBRARY), ("engine", LIBRARY))
    assert _shown(folded_traceback(error)) == [
        "train",
        "[2 frames of accelerate_cpp, shown with --debug]",
        "tensor",
        "engine",
        "ValueError: boom",
    ]


def test_frames_of_torch_that_called_our_core_become_part_of_the_line() -> None:
    error = _chain(("train", PROGRAM), ("gather", OWN), ("all_gather", LIBRARY))
    ours = MismatchedCollective("differ").with_traceback(error.__traceback__)
    assert _shown(folded_traceback(ours))[:2] == ["train", "[2 frames of accelerate_cpp, shown with --debug]"]


def test_frames_of_torch_that_the_program_called_stay() -> None:
    error = _chain(("train", PROGRAM), ("call", LIBRARY), ("model", PROGRAM))
    assert _shown(folded_traceback(error)) == ["train", "call", "model", "ValueError: boom"]


def test_nothing_is_left_out_on_request() -> None:
    error = _chain(("train", PROGRAM), ("prepare", OWN))
    assert _shown(folded_traceback(error, whole=True)) == ["train", "prepare", "ValueError: boom"]


def test_nothing_is_left_out_of_a_defect_of_the_package() -> None:
    error = _chain(("train", PROGRAM), ("prepare", OWN))
    defect = InternalError("broken").with_traceback(error.__traceback__)
    assert _shown(folded_traceback(defect))[:2] == ["train", "prepare"]


def test_nothing_is_left_out_where_the_program_has_no_frame() -> None:
    assert _shown(folded_traceback(_chain(("main", OWN), ("run", OWN)))) == ["main", "run", "ValueError: boom"]


def test_every_error_of_a_chain_is_folded() -> None:
    inner = _function("check", OWN, "raise KeyError('inner')")
    body = "try:\n    inner()\nexcept KeyError as error:\n    raise ValueError('outer') from error"
    prepare = _function("prepare", OWN, body, inner=inner)
    text = folded_traceback(_caught(_function("train", PROGRAM, "called()", called=prepare)))
    # The first error was caught inside the package, so it has no frame of the program.
    assert text.count("Traceback (most recent call last)") == 2
    assert "in check" in text
    assert _shown(text)[-3:] == ["train", "[1 frame of accelerate_cpp, shown with --debug]", "ValueError: outer"]


def test_endless_recursion_of_the_program_is_shown_as_python_shows_it() -> None:
    function = _function("f", PROGRAM, "again()")
    function.__globals__["again"] = function
    text = folded_traceback(_caught(function))
    assert "[Previous line repeated" in text
    assert "accelerate_cpp" not in text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions came with Python 3.11")
def test_groups_of_exceptions_are_folded_inside_their_frame() -> None:
    error = _chain(("train", PROGRAM), ("prepare", OWN))
    text = folded_traceback(ExceptionGroup("several", [error]))  # noqa: F821 (there from Python 3.11 on)
    assert "    | [1 frame of accelerate_cpp, shown with --debug]\n" in text.replace("|   [", "| [")
    assert "in prepare" not in text
