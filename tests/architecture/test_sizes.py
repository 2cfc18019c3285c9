"""Files and functions stay short enough to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import cxx
import sizes
from exceptions import LONGER_THAN_ALLOWED, LONGER_THAN_ALLOWED_CEILING
from tree import REPOSITORY, render

Plant = Callable[[str, str], Path]
ALLOWED = {row.path for row in LONGER_THAN_ALLOWED}


def test_files_and_functions_are_short() -> None:
    found = [*sizes.file_length_violations(REPOSITORY), *sizes.function_length_violations(REPOSITORY)]
    surplus = [violation for violation in found if violation.path not in ALLOWED]
    assert not surplus, render(surplus)


def test_the_facade_only_delegates() -> None:
    found = list(sizes.facade_violations(REPOSITORY))
    assert not found, render(found)


def test_the_list_of_exceptions_only_shrinks() -> None:
    found = [*sizes.file_length_violations(REPOSITORY), *sizes.function_length_violations(REPOSITORY)]
    assert {violation.path for violation in found} >= ALLOWED, "a row is no longer needed: remove it"
    assert len(ALLOWED) == LONGER_THAN_ALLOWED_CEILING, "lower the ceiling with the list"


@pytest.mark.parametrize(
    ("path", "lines"),
    [("csrc/core/a.cpp", 401), ("python/accelerate_cpp/a.py", 401), ("csrc/bindings/bind_a.cpp", 201)],
)
def test_a_planted_long_file_is_found(path: str, lines: int, plant: Plant) -> None:
    comment = "// x\n" if path.endswith(".cpp") else "# x\n"
    assert [found.path for found in sizes.file_length_violations(plant(path, comment * lines))] == [path]


def test_a_file_of_exactly_the_limit_is_allowed(plant: Plant) -> None:
    assert list(sizes.file_length_violations(plant("csrc/core/a.cpp", "// x\n" * 400))) == []


def test_a_planted_long_python_function_is_found(plant: Plant) -> None:
    root = plant("python/accelerate_cpp/a.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 51)
    assert [found.line for found in sizes.function_length_violations(root)] == [2]


def test_a_docstring_does_not_count_as_length(plant: Plant) -> None:
    text = 'def f():\n    """One line.\n' + "    more\n" * 60 + '    """\n' + "    x = 1\n" * 50
    assert list(sizes.function_length_violations(plant("python/accelerate_cpp/a.py", text))) == []


LONG_BODY = "  x = 1;\n" * 50
CXX_FUNCTIONS = {
    "free": "int f(int a)\n{\n" + LONG_BODY + "}\n",
    "method": "namespace n {\nstruct S {\n  int f() const noexcept {\n" + LONG_BODY + "  }\n};\n}\n",
    "constructor": "S::S(int a) : a_{a}, b_(2) {\n" + LONG_BODY + "}\n",
    "template": "template <class T, struct U>\nT f(struct stat* s) {\n" + LONG_BODY + "}\n",
    "lambda": "int f() {\n  auto g = [&](int a) {\n" + LONG_BODY + "  };\n}\n",
    "test": "TEST(Suite, Sentence) {\n" + LONG_BODY + "}\n",
    "brace in a literal": "int f() {\n  auto s = \"}\"; auto c = '}';  // }\n" + LONG_BODY + "}\n",
}


@pytest.mark.parametrize("kind", CXX_FUNCTIONS)
def test_a_planted_long_cxx_function_is_found(kind: str, plant: Plant) -> None:
    root = plant("csrc/core/a.cpp", CXX_FUNCTIONS[kind])
    assert len(list(sizes.function_length_violations(root))) == 1


def test_a_long_class_or_namespace_is_not_a_function(plant: Plant) -> None:
    text = (
        "namespace n {\nclass A final : public B {\n"
        + "  int f() { return 1; }\n" * 60
        + "};\nenum class E { a };\n}\n"
    )
    assert list(sizes.function_length_violations(plant("csrc/core/a.cpp", text))) == []


def test_the_length_of_a_cxx_function_runs_from_its_signature_to_its_brace() -> None:
    (function,) = cxx.functions("int f() {\n  return 1;\n}\n")
    assert (function.line, function.length) == (1, 3)


def test_a_planted_busy_facade_method_is_found(plant: Plant) -> None:
    text = 'class Accelerator:\n    def f(self):\n        """Doc."""\n' + "        x = 1\n" * 6
    assert [found.line for found in sizes.facade_violations(plant(sizes.FACADE, text))] == [2]
