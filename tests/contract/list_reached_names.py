"""Lists the names of ``accelerate`` that other programs reach for, private ones as well, from their sources.

    python tests/contract/list_reached_names.py SOURCES tests/contract/reached_names.json

``SOURCES`` has a folder for each program, named like it, with its Python files; programs are read, never run. The
result keeps the names that the installed original has, since programs also put attributes of their own on its objects,
and says for each which programs reach for it. What is listed:

* imports: ``from accelerate.state import is_initialized``;
* attributes of modules and classes: ``accelerate.state.is_initialized``, ``PartialState._reset_state``;
* attributes of objects: of what a file makes by a class of accelerate, and of everything called ``accelerator``
  (``self.accelerator._prepare_cp``), listed under the class;
* names in strings, as tests patch them: ``"accelerate.state.is_xpu_available"``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "accelerate"
ACCELERATOR = f"{PACKAGE}.Accelerator"
# What the attributes of an Accelerator are.
PARTS = {"state": f"{PACKAGE}.state.AcceleratorState", "gradient_state": f"{PACKAGE}.state.GradientState"}
_DOTTED = re.compile(rf"{PACKAGE}(?:\.[A-Za-z_]\w*)+")


class Reached(ast.NodeVisitor):
    """The names that one file reaches for, in ``names``."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._bound: dict[str, str] = {}
        self._objects: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] == PACKAGE:
                self.names.add(alias.name)
                self._bound[alias.asname or PACKAGE] = alias.name if alias.asname else PACKAGE

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level == 0 and module.partition(".")[0] == PACKAGE:
            for alias in node.names:
                if alias.name != "*":
                    self.names.add(f"{module}.{alias.name}")
                    self._bound[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        made = self._made_by(node.value)
        for target in node.targets:
            if made is not None and (name := _last_name(target)):
                self._objects[name] = made

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self._owner(node.value)
        if owner is not None:
            self.names.add(f"{owner}.{node.attr}")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            self.names.add(node.value)

    def _owner(self, node: ast.expr) -> str | None:
        """The dotted name of the module or class whose attribute ``node`` is asked for."""
        if isinstance(node, ast.Call):
            return self._made_by(node)
        dotted = self._dotted(node)
        if dotted is not None:
            return dotted
        if isinstance(node, ast.Attribute) and node.attr in PARTS and self._owner(node.value) == ACCELERATOR:
            return PARTS[node.attr]
        last = _last_name(node)
        return ACCELERATOR if last == "accelerator" else self._objects.get(last or "")

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self._bound.get(node.id)
        if isinstance(node, ast.Attribute):
            inner = self._dotted(node.value)
            return None if inner is None else f"{inner}.{node.attr}"
        return None

    def _made_by(self, node: ast.expr) -> str | None:
        """The class of which a call makes an object."""
        dotted = self._dotted(node.func) if isinstance(node, ast.Call) else None
        return dotted if dotted is not None and dotted.rpartition(".")[2][:1].isupper() else None


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def names_of_file(text: str) -> set[str]:
    """The names of ``accelerate`` in one source text."""
    if PACKAGE not in text and "accelerator" not in text:
        return set()
    reached = Reached()
    reached.visit(ast.parse(text))
    return reached.names


def names_of_programs(sources: Path) -> dict[str, set[str]]:
    """For each name, the folders of ``sources`` whose files reach for it."""
    found: dict[str, set[str]] = defaultdict(set)
    for program in sorted(path for path in sources.iterdir() if path.is_dir()):
        for path in sorted(program.rglob("*.py")):
            try:
                names = names_of_file(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError) as error:
                print(f"{path}: left out, as it cannot be read: {error}", file=sys.stderr)
                continue
            for name in names:
                found[name].add(program.name)
    return found


class Missing(Exception):
    """A name is not there."""


def look_up(name: str, package: str = PACKAGE) -> None:
    """Looks ``name`` (which begins with ``accelerate``) up in ``package``, without computing what properties give.

    Raises:
        Missing: it is not there.
    """
    found: Any = importlib.import_module(package)
    path = package
    parts = name.split(".")[1:]
    for place, part in enumerate(parts):
        if isinstance(found, type):
            if not _has(found, part):
                raise Missing(f"{path} has no {part!r}")
            found = inspect.getattr_static(found, part, None)
            if not isinstance(found, type):
                return  # what lies further inside is an attribute of some object
            continue
        path = f"{path}.{part}"
        found = _of_module(found, part, path)
        if place < len(parts) - 1 and not isinstance(found, (ModuleType, type)):
            return


def _of_module(module: Any, part: str, path: str) -> Any:
    try:
        return getattr(module, part)
    except AttributeError:
        try:
            return importlib.import_module(path)
        except ImportError as error:
            raise Missing(f"{path} is not there: {error}") from error


def _has(kind: type, name: str) -> bool:
    missing = object()
    return inspect.getattr_static(kind, name, missing) is not missing or name in _attributes_of_objects(kind)


_OBJECTS: dict[type, frozenset[str]] = {}


def _attributes_of_objects(kind: type) -> frozenset[str]:
    """The attributes that objects of ``kind`` made without arguments have besides those of the class."""
    if kind not in _OBJECTS:
        try:
            made = kind(cpu=True) if kind.__name__ == "Accelerator" else kind()
        except Exception:  # of this class no object can be made so, and only its class is looked at
            _OBJECTS[kind] = frozenset(getattr(kind, "__annotations__", {}))
        else:
            _OBJECTS[kind] = frozenset(vars(made)) | frozenset(getattr(type(made), "__dataclass_fields__", {}))
    return _OBJECTS[kind]


def in_package(names: Iterable[str], package: str = PACKAGE) -> Iterator[str]:
    """Those of ``names`` that ``package`` has."""
    for name in sorted(names):
        try:
            look_up(name, package)
        except Missing:
            continue
        yield name


def main(sources: Path, result: Path) -> None:
    """Writes the contract ``result``."""
    warnings.simplefilter("ignore")
    found = names_of_programs(sources)
    kept = {name: sorted(found[name]) for name in in_package(found)}
    content = {
        "meta": {
            "source": f"accelerate {version(PACKAGE)}; written by list_reached_names.py",
            "programs": sorted(path.name for path in sources.iterdir() if path.is_dir()),
        },
        "names": kept,
    }
    result.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
