"""Small changes of a Python source, each of which a test should notice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Change = Callable[[Any], object]

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True)
class Mutation:
    """One change of a module.

    Attributes:
        line: where it is, from 1.
        what: in words, with the code before and after.
        source: of the whole module, changed.
    """

    line: int
    what: str
    source: str


def mutations(source: str) -> Iterator[Mutation]:
    """Every mutation of ``source``, in the order of its lines; annotations and docstrings are left alone."""
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            mutant = copy.deepcopy(tree)
            target = next(found for place, found in enumerate(ast.walk(mutant)) if place == number)
            before = ast.unparse(node)
            change(target)
            after = ast.unparse(target)
            line = getattr(node, "lineno", 0)
            if line and before != after:
                yield Mutation(line, _difference(before, after), ast.unparse(ast.fix_missing_locations(mutant)))


def _difference(before: str, after: str) -> str:
    """The first line that differs, as it was and as it is."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    old, new = next(((old, new) for old, new in pairs if old != new), (before, after))
    return f"{old.strip()} -> {new.strip()}"


def _changes(node: ast.AST) -> list[Change]:
    """Functions that change a copy of ``node`` in place, each in another way."""
    return [*_replacements(node), *_removals(node)]


def _replacements(node: ast.AST) -> list[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        comparison = _COMPARISONS[type(node.ops[0])]
        return [lambda copied: copied.ops.__setitem__(0, comparison())]
    if isinstance(node, ast.BoolOp):
        connective = ast.Or if isinstance(node.op, ast.And) else ast.And
        return [lambda copied: setattr(copied, "op", connective())]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_text(node.left):
        operator = _OPERATORS[type(node.op)]
        return [lambda copied: setattr(copied, "op", operator())]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [lambda copied: setattr(copied, "operand", ast.UnaryOp(ast.Not(), copied.operand))]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [lambda copied: setattr(copied, "value", not copied.value)]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [lambda copied: setattr(copied, "value", copied.value + 1)]
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        return [lambda copied: setattr(copied, "value", ast.Constant(None))]
    if isinstance(node, ast.If):
        return [lambda copied: setattr(copied, "test", ast.UnaryOp(ast.Not(), copied.test))]
    return []


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _removals(node: ast.AST) -> list[Change]:
    """Each call, and each addition to a variable, in the body of a function or of a block: left out."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.Lambda):
        return []
    body = getattr(node, "body", None)
    return [
        _removal(place)
        for place, statement in enumerate(body if isinstance(body, list) else ())
        if isinstance(statement, ast.AugAssign)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call))
    ]


def _removal(place: int) -> Change:
    return lambda copied: copied.body.__setitem__(place, ast.Pass())
