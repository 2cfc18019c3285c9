"""Which libraries are installed, and of which versions: asked without importing them."""

from __future__ import annotations

import importlib.util
import operator
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate_cpp.errors import InvalidArgument

if TYPE_CHECKING:
    from packaging.version import Version

STR_OPERATION_TO_FUNC: Mapping[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def found(module: str) -> bool:
    """Whether ``module`` could be imported. The packages that it is in are imported to find out."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return importlib.util.find_spec(module) is not None


def has_code(module: str) -> bool:
    """Like :func:`found`, but a folder of that name that holds no code does not count: trackers write such folders."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # what was put into sys.modules by hand
        return True
    return spec is not None and spec.origin is not None


def _installed_version(distributions: tuple[str, ...]) -> str | None:
    """The version of the first of these distributions that is installed."""
    import importlib.metadata  # here, as a program that asks nothing need not load it

    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_installed(module: str, *distributions: str, at_least: str | None = None, below: str | None = None) -> bool:
    """Whether ``module`` can be imported and belongs to one of ``distributions`` (default: one of its own name).

    A folder that happens to have the name of a library is not a distribution, and does not count.

    Args:
        at_least: the oldest version that counts.
        below: the first version that does not count any more.
    """
    version = _installed_version(distributions or (module,)) if found(module) else None
    if version is None:
        return False
    from packaging.version import Version  # here, as few questions are about versions

    return (at_least is None or Version(version) >= Version(at_least)) and (
        below is None or Version(version) < Version(below)
    )


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
    import importlib.metadata

    from packaging.version import Version

    found = library_or_version
    if not isinstance(found, Version):
        found = Version(importlib.metadata.version(found))
    return STR_OPERATION_TO_FUNC[operation](found, Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether the installed torch stands in this relation to ``version``; torch is not imported for it."""
    return compare_versions("torch", operation, version)
