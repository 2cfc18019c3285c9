"""Relations between versions."""

from __future__ import annotations

import importlib.metadata

import accelerate.utils.versions as original
import pytest
from packaging.version import Version

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.utils import compare_versions, is_torch_version

INSTALLED = importlib.metadata.version("torch")
OPERATIONS = (">", ">=", "==", "!=", "<=", "<")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("version", ["1.0", "99.0", INSTALLED, Version(INSTALLED).base_version])
def test_relations_are_those_of_the_original(operation: str, version: str) -> None:
    assert is_torch_version(operation, version) is original.is_torch_version(operation, version)
    assert compare_versions("numpy", operation, version) is original.compare_versions("numpy", operation, version)


@pytest.mark.parametrize(
    ("operation", "holds"), [*zip(OPERATIONS, (True, True, False, True, False, False), strict=True)]
)
def test_ten_comes_after_nine(operation: str, holds: bool) -> None:
    assert compare_versions(Version("1.10"), operation, "1.9") is holds


def test_another_operation_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"operation='~=': expected one of > >= == != <= <"):
        compare_versions("torch", "~=", "2.0")


def test_what_is_not_installed_has_no_version() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="no_such_library"):
        compare_versions("no_such_library", ">", "1")
