"""Direction of includes and imports, and the names that only some layers may touch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import cxx
from tree import PACKAGE, ROOT_FOLDERS, Violation, cxx_files, is_root_file, parse, python_files

TORCH_INCLUDE = re.compile(r"^(torch|ATen|c10|caffe2)/")
PYBIND_INCLUDE = re.compile(r"^(pybind11/|torch/extension\.h|torch/csrc/utils/pybind\.h)")
PYTHON_INCLUDE = re.compile(r"^Python\.h$|^torch/csrc/python_headers\.h$")

# Folder of csrc → includes it may not have, with the name of the rule.
FORBIDDEN_INCLUDES: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {
    "core": (
        (TORCH_INCLUDE, "the core knows no torch"),
        (PYBIND_INCLUDE, "the core knows no pybind11"),
        (PYTHON_INCLUDE, "the core knows no Python"),
        (re.compile(r"^(torch_bridge|bindings)/"), "the core knows no layer above it"),
    ),
    "torch_bridge": (
        (PYBIND_INCLUDE, "the bridge knows no pybind11"),
        (re.compile(r"^bindings/"), "the bridge knows no layer above it"),
    ),
    "bindings": (),
}

# Folder or module of the package → its height: it imports itself and what stands below; siblings share a height.
PYTHON_LAYERS = {
    "runtime": 5,
    **dict.fromkeys(("parallel", "launch", "data", "precision", "checkpoint", "offload", "trackers"), 4),
    **dict.fromkeys(("comm", "devices"), 3),
    "config": 2,
    "_native": 1,
    **dict.fromkeys(("errors", "_build_info", "_C"), 0),
}
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


def folder_name_violations(root: Path) -> Iterator[Violation]:
    """Folders that would shadow torch's own headers."""
    for path in cxx_files(root, "csrc"):
        for part in path.parts[1:-1]:
            if part.lower() in {"torch", "aten", "c10"}:
                yield Violation(str(path), 0, f"a folder named {part} shadows torch's headers")


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, ``from a import b`` as ``a.b``; those under TYPE_CHECKING are left out."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            skipped.update(inner for statement in node.body for inner in ast.walk(statement))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def import_violations(root: Path) -> Iterator[Violation]:
    """Imports that point upwards or sideways between the folders of the package."""
    for path in python_files(root, PACKAGE):
        if is_root_file(path) and path.relative_to(PACKAGE).parts[0] not in {"errors.py", "_native.py"}:
            continue
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own not in PYTHON_LAYERS:
            yield Violation(str(path), 0, f"folder {own} is not among the layers of the design")
            continue
        for line, name in _imports(parse(root / path)):
            if name.startswith("."):
                yield Violation(str(path), line, "relative import: write the full name")
            if not name.startswith("accelerate_cpp."):
                continue
            target = name.split(".")[1]
            if target == own:
                continue
            if target not in PYTHON_LAYERS:
                yield Violation(str(path), line, f"{own} imports {name} of the drop-in surface, which stands above it")
            elif PYTHON_LAYERS[target] >= PYTHON_LAYERS[own]:
                yield Violation(str(path), line, f"{own} imports {name}, which does not stand below it")


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
    """Uses of the label DistributedType below the drop-in surface."""
    for path in python_files(root, PACKAGE):
        if is_root_file(path):
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
    """Imports of the one global below the drop-in surface."""
    module = "accelerate_cpp.runtime.current"
    for path in python_files(root, PACKAGE):
        if is_root_file(path):
            continue
        for line, name in _imports(parse(root / path)):
            if name == module or name.startswith(module + "."):
                yield Violation(str(path), line, f"only the files of {sorted(ROOT_FOLDERS)} and the root read {module}")
