"""Packages whose names are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from accelerate_cpp.errors import BuildMismatch


def lazy_names(
    package: str, namespace: dict[str, Any], module_of: Mapping[str, str], submodules: Collection[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions that a package binds to ``__getattr__`` and ``__dir__``.

    Args:
        package: its full name.
        namespace: its ``globals()``; a name is stored there once it has been loaded.
        module_of: for each public name, the full name of the module that has it.
        submodules: modules that are attributes of the package although nobody has imported them.
    """

    def load(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(module_of[name]), name)
        except BuildMismatch as mismatch:
            raise mismatch.with_traceback(None) from None  # the way through the modules of the package tells nothing
        namespace[name] = value
        return value

    def list_names() -> list[str]:
        return sorted({*namespace, *module_of, *submodules})

    return load, list_names
