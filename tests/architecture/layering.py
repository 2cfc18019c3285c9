"""Direction of includes and imports, and the names that only some layers may touch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import cxx
import structure
from tree import PACKAGE, Violation, cxx_files, is_root_file, parse, python_files

TORCH_INCLUDE = re.compile(r"^(torch|ATen|c10|caffe2)/")
PYBIND_INCLUDE = re.compile(r"^(pybind11/|torch/extension\.h|torch/csrc/utils/pybind\.h)")
PYTHON_INCLUDE = re.compile(r"^Python\.h$|^torch/csrc/python_headers\.h$")

# Folder of csrc → includes it may not have, with the name of the rule.
FORBIDDEN_INCLUDES: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "core": (
        (TORCH_INCLUDE, "the core knows no torch"),
        (PYBIND_INCLUDE, "the core knows no pybind11"),
        (PYTHON_INCLUDE, "the core knows no Python"),
        (re.compile(r"^(torch_bridge|xla_calls|bindings)/"), "the core knows no layer above it"),
    ),
    "torch_bridge": (
        (PYBIND_INCLUDE, "the bridge knows no pybind11"),
        (re.compile(r"^(xla_calls|bindings)/"), "the bridge knows no layer above it, nor XLA"),
    ),
    "xla_calls": (
        (TORCH_INCLUDE, "custom calls of XLA know no torch"),
        (PYBIND_INCLUDE, "custom calls of XLA know no pybind11"),
        (PYTHON_INCLUDE, "custom calls of XLA know no Python"),
        (re.compile(r"^(torch_bridge|bindings)/"), "custom calls of XLA stand on the core alone"),
    ),
    "bindings": (),
}

# Folders of the core from above to below; those that share a line do not know each other.
CORE_LAYERS: tuple[tuple[str, ...], ...] = (
    ("grad",),
    ("comm",),
    ("amp", "cuda", "data", "offload", "placement"),
    ("base",),
)
CORE_HEIGHTS = {folder: -number for number, folders in enumerate(CORE_LAYERS) for folder in folders}

# The rooms of the package from above to below: what is in one imports itself and what stands below it. Those that share
# a line do not know each other, but for the first: the interface that users know, and its tools.
PYTHON_LAYERS: tuple[tuple[str, ...], ...] = (
    ("", "alias", "check", "commands", "frameworks", "jax", "keras", "tensorflow", "test_utils", "utils"),
    ("launch", "prepare"),
    ("runtime",),
    ("quantization",),
    ("placement",),
    ("checkpoint",),
    ("data", "parallel", "precision", "trackers"),
    ("plugins",),
    ("comm", "devices"),
    ("config",),
    ("_native",),
    ("installation",),
    ("errors", "_C", "_build_info"),
)
# What lends names to every module; it imports nothing of the package but as a name is asked for.
LENDING = {"lazy", "alias.borrowed_names"}
HEIGHTS = {room: -number for number, rooms in enumerate(PYTHON_LAYERS) for room in rooms}
ENVIRONMENT_NAMES = {"environ", "getenv", "putenv", "unsetenv", "environb", "getenvb"}


def include_violations(root: Path) -> Iterator[Violation]:
    """Includes that point upwards, and reads of the environment in C++."""
    for path in cxx_files(root, "csrc"):
        layer = path.parts[1]
        text = (root / path).read_text()
        if layer not in FORBIDDEN_INCLUDES:
            yield Violation(str(path), 0, f"csrc has the layers {', '.join(FORBIDDEN_INCLUDES)}, not {layer}")
            continue
        for line, name in cxx.includes(text):
            for pattern, rule in FORBIDDEN_INCLUDES[layer]:
                if pattern.search(name):
                    yield Violation(str(path), line, f"includes {name}: {rule}")
        for match in re.finditer(r"\b(secure_)?getenv\b", cxx.without_comments(text)):
            yield Violation(str(path), text.count("\n", 0, match.start()) + 1, "C++ does not read the environment")


def core_violations(root: Path) -> Iterator[Violation]:
    """Includes between the folders of the core that point upwards or sideways."""
    for path in cxx_files(root, "csrc/core"):
        own = path.parts[2]
        if own not in CORE_HEIGHTS:
            yield Violation(str(path), 0, f"csrc/core has the folders {', '.join(CORE_HEIGHTS)}, not {own}")
            continue
        for line, name in cxx.includes((root / path).read_text()):
            target = name.split("/")[1] if name.startswith("core/") else own
            if target != own and CORE_HEIGHTS[target] >= CORE_HEIGHTS[own]:
                yield Violation(str(path), line, f"{own} includes {name}, which does not stand below it")


def folder_name_violations(root: Path) -> Iterator[Violation]:
    """Folders that would shadow torch's own headers."""
    for path in cxx_files(root, "csrc"):
        for part in path.parts[1:-1]:
            if part.lower() in {"torch", "aten", "c10"}:
                yield Violation(str(path), 0, f"a folder named {part} shadows torch's headers")


def import_violations(root: Path) -> Iterator[Violation]:
    """Imports that point upwards or sideways between the rooms of the package, those for type checkers included."""
    for name, targets in structure.import_graph(root).items():
        own, path = _room(name), _path(name)
        if "." in name and own == "":
            yield Violation(path, 0, f"folder {name.partition('.')[0]} is not among the rooms of the design")
            continue
        for target, line in targets.items():
            room = _room(target)
            if room == own or target in LENDING or HEIGHTS[room] == HEIGHTS[own] == 0:
                continue
            if HEIGHTS[room] >= HEIGHTS[own]:
                yield Violation(path, line, f"imports {target}, which does not stand below it")


def _path(module: str) -> str:
    return f"{PACKAGE}/{module.replace('.', '/')}.py"


def _room(module: str) -> str:
    """The folder that ``module`` is in, ``""`` for files of the package itself, but for the lowest ones."""
    first = module.partition(".")[0]
    return first if first in HEIGHTS else ""


def cycle_violations(root: Path) -> Iterator[Violation]:
    """Modules that import themselves through others, type checkers' imports and those in functions included."""
    for group in structure.cycles(structure.import_graph(root)):
        yield Violation(_path(group[0]), 0, f"imports itself: {' ↔ '.join(group)}")


def relative_import_violations(root: Path) -> Iterator[Violation]:
    """Imports that do not say the full name."""
    for path in python_files(root, PACKAGE):
        for line, name in structure.imports(parse(root / path)):
            if name.startswith("."):
                yield Violation(str(path), line, "relative import: write the full name")


def environment_violations(root: Path) -> Iterator[Violation]:
    """Reads and writes of the environment outside config/env_table.py and launch/."""
    for path in python_files(root, PACKAGE):
        inside = path.relative_to(PACKAGE)
        if inside == Path("config/env_table.py") or inside.parts[0] == "launch":
            continue
        for node in ast.walk(parse(root / path)):
            attribute = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"
            if attribute and node.attr in ENVIRONMENT_NAMES:
                yield Violation(str(path), node.lineno, f"os.{node.attr}: variables are rows of config/env_table.py")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                for alias in node.names:
                    if alias.name in ENVIRONMENT_NAMES:
                        yield Violation(str(path), node.lineno, f"imports os.{alias.name}")


def label_violations(root: Path) -> Iterator[Violation]:
    """Uses of the label DistributedType below the drop-in surface, but where it is defined."""
    for path in python_files(root, PACKAGE):
        if is_root_file(path) or path == Path(PACKAGE, "plugins", "enums.py"):
            continue
        for node in ast.walk(parse(root / path)):
            names = {
                ast.Name: lambda n: [n.id],
                ast.Attribute: lambda n: [n.attr],
                ast.ImportFrom: lambda n: [alias.name for alias in n.names],
            }.get(type(node), lambda n: [])(node)
            if "DistributedType" in names:
                yield Violation(str(path), node.lineno, "DistributedType is a label of the drop-in surface")


def global_violations(root: Path) -> Iterator[Violation]:
    """Imports of the one global by rooms below the one that has it."""
    module = "runtime.current"
    for name, targets in structure.import_graph(root).items():
        if module in targets and HEIGHTS[_room(name)] < HEIGHTS["runtime"]:
            yield Violation(_path(name), targets[module], f"{module} is read by runtime and what stands above it")
