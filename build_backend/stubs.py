"""Writes ``__init__.pyi`` of the packages whose names are loaded lazily, so that type checkers and editors know them.

``python build_backend/stubs.py`` brings the files up to date; a test compares them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "python"
PACKAGES = ("accelerate_cpp", "accelerate_cpp.test_utils", "accelerate_cpp.utils")
_HEADER = """\
# Written by `make docs` from __init__.py, whose names are loaded when they are first used.
# fmt: off
# ruff: noqa
"""


def stub_file(package: str) -> Path:
    """Where the stub of ``package`` lies."""
    return SOURCES.joinpath(*package.split("."), "__init__.pyi")


def stub_of(package: str) -> str:
    """The text of the stub: every lazy name and every submodule as an import, so that their types are known."""
    module = importlib.import_module(package)
    names: dict[str, str] = dict(module._MODULE_OF)
    # A function may have the name of its module; then the name is that of the function.
    names.update({name: f"{package}.{name}" for name in module.__all__ if name not in names})
    modules = sorted(module._SUBMODULES - names.keys())
    lines = [f"from {package} import {name} as {name}" for name in modules]
    lines += [f"from {names[name]} import {name} as {name}" for name in sorted(names)]
    if hasattr(module, "__version__"):
        lines.append("__version__: str")
    return "\n".join([_HEADER, *lines]) + "\n"


def main() -> None:
    """Writes all stubs."""
    sys.path.insert(0, str(SOURCES))
    for package in PACKAGES:
        stub_file(package).write_text(stub_of(package))


if __name__ == "__main__":
    main()
