"""Finds where in the user's program something happens, and how often the loop around it runs."""

from __future__ import annotations

import ast
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_NOT_THE_USERS = (
    _PACKAGE,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(folder + os.sep for folder in (*site.getsitepackages(), site.getusersitepackages())),
    "<frozen",
)


def is_the_users(code: CodeType) -> bool:
    """Whether ``code`` belongs neither to Python, nor to this package, nor to an installed package."""
    return not os.path.abspath(code.co_filename).startswith(_NOT_THE_USERS) and code.co_filename[:1] != "<"


def user_frame() -> FrameType | None:
    """The innermost frame of the user's code in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_the_users(frame.f_code):
        frame = frame.f_back
    return frame


def place(filename: str, line: int | None) -> str:
    """``file:line``, relative to the working directory when the file lies below it."""
    return f"{os.path.abspath(filename).removeprefix(os.getcwd() + os.sep)}:{line}"


def here() -> str:
    """``file:line`` of the user's code that runs, or empty."""
    frame = user_frame()
    return "" if frame is None else place(frame.f_code.co_filename, frame.f_lineno)


def place_of_error(traceback: TracebackType | None) -> str:
    """``file:line`` of the innermost code of the user's in ``traceback``, or empty."""
    found = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_the_users(code):
            found = place(code.co_filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def repetitions(frame: FrameType | None) -> int | None:
    """How often a loop over a ``range`` around the running line of ``frame``, or of a caller, runs; ``None``: unknown.

    The running line is the header of a loop over batches, which itself is not meant. Where it is something else, such
    as a call of ``next``, the loop around it is the one over batches, and nothing is known.
    """
    if frame is None or not _is_header(_syntax(frame.f_code.co_filename), frame.f_lineno):
        return None
    while frame is not None:
        if is_the_users(frame.f_code):
            tree = _syntax(frame.f_code.co_filename)
            for loop in _loops_around(tree, frame.f_lineno):
                return _length(loop.iter, frame) if isinstance(loop, ast.For) and not _may_stop(loop) else None
        frame = frame.f_back
    return None


def _syntax(filename: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except SyntaxError:  # a template, or a cell with magics
        return ast.Module(body=[], type_ignores=[])


def _is_header(tree: ast.AST, line: int) -> bool:
    """Whether ``line`` is in the header of a loop of ``tree``."""
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.comprehension))]
    return any(getattr(loop, "lineno", loop.target.lineno) <= line <= (loop.iter.end_lineno or line) for loop in loops)


def _loops_around(tree: ast.Module, line: int) -> list[ast.For | ast.While]:
    """Loops whose bodies hold ``line``, the innermost first, within the innermost function that does."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or line)]
    scope = max((node.lineno for node in around), default=0)
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.While))
        and node.lineno >= scope
        and node.lineno != line  # else it is the one over batches, with its body in the same line
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line)
    ]
    return sorted(loops, key=lambda loop: -loop.lineno)


def _may_stop(loop: ast.For) -> bool:
    """Whether the loop, or one within it, can be left before its end."""
    return any(isinstance(node, (ast.Break, ast.Return)) for node in ast.walk(loop))


def _length(iterable: ast.expr, frame: FrameType) -> int | None:
    """The length of a call of ``range``, which may be inside another call such as ``tqdm(range(n))``."""
    if not isinstance(iterable, ast.Call):
        return None
    if not (isinstance(iterable.func, ast.Name) and iterable.func.id == "range"):
        return _length(iterable.args[0], frame) if iterable.args else None
    bounds = [_value(argument, frame) for argument in iterable.args]
    return len(range(*bounds)) if all(isinstance(bound, int) for bound in bounds) else None


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int | None]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b if b else None,
}


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """The value of numbers, names, attributes, dictionary entries, and sums and products of them; nothing is called."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        return getattr(_value(expression.value, frame), expression.attr, None)
    if isinstance(expression, ast.Subscript):
        container = _value(expression.value, frame)
        return container.get(_value(expression.slice, frame)) if isinstance(container, dict) else None
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Name) and expression.func.id == "int":
        value = _value(expression.args[0], frame) if expression.args else None
        return int(value) if isinstance(value, (int, float)) else None
    if isinstance(expression, ast.BinOp):
        left, right = _value(expression.left, frame), _value(expression.right, frame)
        operation = _OPERATIONS.get(type(expression.op))
        if operation is not None and isinstance(left, int) and isinstance(right, int):
            return operation(left, right)
    return None
