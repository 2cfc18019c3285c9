"""The trees of tests mirror the trees of sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mirror
from exceptions import WITHOUT_TEST_TWIN, WITHOUT_TEST_TWIN_CEILING
from tree import REPOSITORY, render

Plant = Callable[[str, str], Path]
ALLOWED = {row.path for row in WITHOUT_TEST_TWIN}


def test_every_source_file_has_its_test_twin() -> None:
    missing = [violation for violation in mirror.violations(REPOSITORY) if violation.path not in ALLOWED]
    assert not missing, render(missing)


def test_the_list_of_exceptions_only_shrinks() -> None:
    missing = {violation.path for violation in mirror.violations(REPOSITORY)}
    assert missing >= ALLOWED, f"rows no longer needed: {sorted(ALLOWED - missing)}"
    assert len(ALLOWED) == WITHOUT_TEST_TWIN_CEILING, "lower the ceiling with the list"
    assert all(row.reason for row in WITHOUT_TEST_TWIN)


@pytest.mark.parametrize(
    ("path", "text", "twin"),
    [
        ("csrc/core/comm/solo.cpp", "int f() { return 1; }\n", "tests/cpp/core/comm/solo_test.cpp"),
        ("csrc/core/base/half.h", "inline int f() { return 1; }\n", "tests/cpp/core/base/half_test.cpp"),
        ("csrc/torch_bridge/tree.cpp", "int f() { return 1; }\n", "tests/cpp/torch_bridge/tree_test.cpp"),
        ("csrc/torch_bridge/tree.cpp", "int f() { return 1; }\n", "tests/python/torch_bridge/test_tree.py"),
        ("csrc/bindings/bind_comm.cpp", "int f() { return 1; }\n", "tests/python/bindings/test_comm.py"),
        ("python/accelerate_cpp/comm/ops.py", "x = 1\n", "tests/python/comm/test_ops.py"),
        ("python/accelerate_cpp/state.py", "x = 1\n", "tests/python/test_state.py"),
    ],
)
def test_a_planted_source_without_twin_is_found_until_it_has_one(path: str, text: str, twin: str, plant: Plant) -> None:
    assert [violation.path for violation in mirror.violations(plant(path, text))] == [path]
    assert mirror.violations(plant(twin, "")) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("csrc/core/comm/communicator.h", "class A {\n  virtual void f() = 0;\n};\n"),
        ("csrc/bindings/module.cpp", "int f() { return 1; }\n"),
        ("python/accelerate_cpp/comm/__init__.py", ""),
    ],
)
def test_interfaces_and_package_files_need_no_twin(path: str, text: str, plant: Plant) -> None:
    assert mirror.violations(plant(path, text)) == []
