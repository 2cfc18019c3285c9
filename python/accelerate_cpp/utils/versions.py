"""Comparing the versions of installed libraries."""

from __future__ import annotations

import importlib.metadata
import operator
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import Version

from accelerate_cpp.errors import InvalidArgument

__all__ = ["compare_versions", "is_torch_version"]

STR_OPERATION_TO_FUNC: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether a version stands in this relation to another: ``compare_versions("numpy", ">=", "1.23")``.

    Args:
        library_or_version: the name of an installed distribution, or a version.
        operation: one of ``> >= == != <= <``. As in PEP 440, a local version such as ``2.0+cpu`` is above ``2.0``.
        requirement_version: the version to compare with.

    Raises:
        InvalidArgument: another operation.
        importlib.metadata.PackageNotFoundError: no such distribution is installed.
    """
    if operation not in STR_OPERATION_TO_FUNC:
        raise InvalidArgument(f"operation={operation!r}: expected one of {' '.join(STR_OPERATION_TO_FUNC)}")
    found = library_or_version
    if not isinstance(found, Version):
        found = Version(importlib.metadata.version(found))
    return STR_OPERATION_TO_FUNC[operation](found, Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch stands in this relation to ``version``; torch is not imported for it."""
    return compare_versions("torch", operation, version)
