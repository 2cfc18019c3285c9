"""Helpers of tests, and the module that has all of them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import accelerate.test_utils.testing as original
import pytest
import torch

import accelerate_cpp.test_utils
from accelerate_cpp import PartialState, debug_launcher
from accelerate_cpp.test_utils import testing

MODULES = ("backend", "cases", "processes", "requirements")


@pytest.mark.parametrize("module", MODULES)
def test_everything_can_be_imported_from_testing(module: str) -> None:
    source = importlib.import_module(f"accelerate_cpp.test_utils.{module}")
    for name in source.__all__:
        assert getattr(testing, name) is getattr(source, name)


@pytest.mark.parametrize("name", accelerate_cpp.test_utils.__all__)
def test_names_of_the_package_are_those_of_its_modules(name: str) -> None:
    value = getattr(accelerate_cpp.test_utils, name)
    assert value is getattr(testing, name, value)
    if callable(value) and hasattr(original, name):
        parameters = inspect.signature(value).parameters
        assert list(parameters) == list(inspect.signature(getattr(original, name)).parameters)


def test_what_a_function_prints_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    def greet(name: str, *, mark: str) -> None:
        print("hello", name, mark)

    assert testing.capture_call_output(greet, "you", mark="!") == "hello you !\n"
    assert capsys.readouterr().out == ""


def fails(error: type[Exception], message: str | None, raised: Exception | None) -> bool:
    answers = []
    for module in (testing, original):
        assert_exception: Any = module.assert_exception
        try:
            with assert_exception(error, message):
                if raised is not None:
                    raise raised
            answers.append(False)
        except AssertionError:
            answers.append(True)
    assert answers[0] is answers[1]
    return answers[0]


@pytest.mark.parametrize(
    ("error", "message", "raised", "expected"),
    [
        (ValueError, None, ValueError("x"), False),
        (ValueError, "x", ValueError("see x"), False),
        (Exception, None, ValueError("x"), False),
        (ValueError, "y", ValueError("x"), True),
        (ValueError, None, KeyError("x"), True),
        (ValueError, None, None, True),
    ],
)
def test_an_exception_is_expected(
    error: type[Exception], message: str | None, raised: Exception | None, expected: bool
) -> None:
    assert fails(error, message, raised) is expected


def _compare() -> tuple[bool, bool]:
    rank = PartialState().process_index
    return testing.are_the_same_tensors(torch.ones(3)), testing.are_the_same_tensors(torch.tensor([1, rank]))


def test_processes_compare_their_tensors() -> None:
    assert debug_launcher(_compare, num_processes=2) == [(True, False)] * 2
    assert testing.are_the_same_tensors(torch.rand(2)) is True
