"""How long files and functions may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cxx
from tree import PACKAGE, Violation, cxx_files, parse, python_files

FILE_LINES = 400
BINDINGS_FILE_LINES = 200
FUNCTION_LINES = 50
FACADE = f"{PACKAGE}/accelerator.py"
FACADE_STATEMENTS = 5
CXX_FOLDERS = ("csrc", "tests", "benchmarks")
PYTHON_FOLDERS = ("python", "tests", "benchmarks", "examples", "build_backend")


def file_length_violations(root: Path) -> Iterator[Violation]:
    """Files with too many lines; the façade, which documents every argument of the interface, is measured otherwise."""
    files = [path for folder in CXX_FOLDERS for path in cxx_files(root, folder)]
    files += [path for folder in PYTHON_FOLDERS for path in python_files(root, folder)]
    for path in files:
        if str(path) == FACADE:
            continue
        limit = BINDINGS_FILE_LINES if path.is_relative_to("csrc/bindings") else FILE_LINES
        lines = len((root / path).read_text().splitlines())
        if lines > limit:
            yield Violation(str(path), 0, f"{lines} lines, at most {limit}")


def function_length_violations(root: Path) -> Iterator[Violation]:
    """Functions with too many lines, signature and docstring of a Python function left out."""
    for path in (path for folder in CXX_FOLDERS for path in cxx_files(root, folder)):
        for function in cxx.functions((root / path).read_text()):
            if function.length > FUNCTION_LINES:
                message = f"function of {function.length} lines, at most {FUNCTION_LINES}: {function.signature[:80]}"
                yield Violation(str(path), function.line, message)
    for path in (path for folder in PYTHON_FOLDERS for path in python_files(root, folder)):
        for node in ast.walk(parse(root / path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = _body(node)
                length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
                if length > FUNCTION_LINES:
                    message = f"function {node.name} of {length} lines, at most {FUNCTION_LINES}"
                    yield Violation(str(path), node.lineno, message)


def facade_violations(root: Path) -> Iterator[Violation]:
    """Methods of the façade that do more than delegate."""
    if not (root / FACADE).is_file():
        return
    for owner in parse(root / FACADE).body:
        for node in owner.body if isinstance(owner, ast.ClassDef) else []:
            if isinstance(node, ast.FunctionDef) and len(_body(node)) > FACADE_STATEMENTS:
                message = f"{owner.name}.{node.name} has {len(_body(node))} statements, at most {FACADE_STATEMENTS}"
                yield Violation(FACADE, node.lineno, message)


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.stmt]:
    """The statements of a function without its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
