"""Every public name is found in a test: what users import, and the methods of what they create."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

import accelerate_cpp
from accelerate_cpp.config.unsupported import FUNCTIONS
from tree import REPOSITORY, python_files

MODULES = sorted(
    {"accelerate_cpp", "accelerate_cpp.utils", "accelerate_cpp.test_utils"}
    | {f"accelerate_cpp.{name}" for name in accelerate_cpp._SUBMODULES}
)
# Named by lists of names alone, which prove that they are there and nothing else.
LISTS = ("tests/contract/", "tests/architecture/", "tests/packaging/")
# Families of functions that a test takes from a table instead of naming each.
FAMILIES = {
    r"is_\w+_available": "tests/python/utils/test_imports.py",
    r"(deepspeed|torchao)_required": "tests/python/utils/test_imports.py",
    r"require_\w+": "tests/python/test_utils/test_requirements.py",
    "|".join(row.name for row in FUNCTIONS): "tests/python/utils/test_not_yet.py",
}


def public_names(module_name: str) -> Iterator[str]:
    """The functions and classes in ``__all__`` of a module; of an ``Accelerator`` its methods, too."""
    module = importlib.import_module(module_name)
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield name
        if value is accelerate_cpp.Accelerator:
            yield from (method for method in vars(value) if not method.startswith("_"))


def words_of_tests() -> set[str]:
    files = [path for path in python_files(REPOSITORY, "tests") if not str(path).startswith(LISTS)]
    return {word for path in files for word in re.findall(r"\w+", (REPOSITORY / path).read_text())}


@pytest.mark.filterwarnings("ignore:accelerate_cpp.memory_utils has moved")
def test_every_public_name_is_in_a_test() -> None:
    words = words_of_tests()
    of_tables = re.compile("|".join(FAMILIES))
    missing = {
        f"{module}: {name}"
        for module in MODULES
        for name in public_names(module)
        if name not in words and not of_tables.fullmatch(name)
    }
    assert sorted(missing) == []


def test_the_tables_of_families_are_where_they_are_said_to_be() -> None:
    assert all((REPOSITORY / path).is_file() for path in FAMILIES.values())
