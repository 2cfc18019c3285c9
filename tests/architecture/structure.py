"""The modules of the package, who imports whom, and what that makes of them: layers, cycles, sizes of folders."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tree import PACKAGE, parse, python_files

Graph = Mapping[str, Mapping[str, int]]
"""By module, the modules that it imports, each with the line of the first import."""


def module_name(path: Path) -> str:
    """The dotted name, inside the package, of a file of it; ``""`` is the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, ``from a import b`` as ``a.b``, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def import_graph(root: Path) -> Graph:
    """Who imports whom in the package, in functions and for type checkers as well."""
    files = {module_name(path): path for path in python_files(root, PACKAGE)}
    graph: dict[str, dict[str, int]] = {}
    for name, path in files.items():
        found: dict[str, int] = {}
        for line, imported in imports(parse(root / path)):
            inside = imported.removeprefix("accelerate_cpp").removeprefix(".")
            if not imported.startswith("accelerate_cpp"):
                continue
            holder = inside.rpartition(".")[0]
            target = holder if inside not in files and holder in files else inside
            if target != name:
                found.setdefault(target, line)
        graph[name] = found
    return graph


def cycles(graph: Graph) -> list[list[str]]:
    """The groups of modules that reach each other (Tarjan's strongly connected components), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            place = stack.index(node)
            group, stack[place:] = sorted(stack[place:]), []
            if len(group) > 1:
                groups.append(group)

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(groups)


def folder_sizes(root: Path) -> dict[str, tuple[int, int]]:
    """For each folder of the package, how many files and lines it has, files of the package itself under ``""``."""
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in python_files(root, PACKAGE):
        folder = path.relative_to(PACKAGE).parts[0] if len(path.relative_to(PACKAGE).parts) > 1 else ""
        sizes[folder][0] += 1
        sizes[folder][1] += (root / path).read_text().count("\n")
    return {folder: (files, lines) for folder, (files, lines) in sorted(sizes.items())}
