"""In which lines of the program its processes are, or wait for each other, in each phase of a step."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.storm.draw import COLLECTIVES

_PROGRAM = Path(__file__).with_name("program.py")
_ORDER = ("backward", "step", *COLLECTIVES, "message", "tracker", "save", "load")
_IN_BACKWARD = ("forward", "backward")
# Who is hit in a phase is waited for there, or in the next one that needs all; others may still be in the one before.
# Not all phases need all.
_NEAR = range(-2, 3)
# What begins a phase in the body of the step.
_BEGINS = {
    "reach('step'": "step",
    "reach(name": "each collective",
    "reach('message'": "message",
    "run.log(": "tracker",
    "happens_inside and": "save",
    "run.load_state": "load",
}


def lines_of_waits(phase: str) -> frozenset[int]:
    """The numbers of the lines in ``program.py`` that what is told of a fault in ``phase`` may name."""
    place = _ORDER.index("backward" if phase in _IN_BACKWARD else phase)
    around = {_ORDER[(place + distance) % len(_ORDER)] for distance in _NEAR}
    return frozenset(line for name in around for line in _lines_of_phases()[name])


@cache
def _lines_of_phases() -> dict[str, set[int]]:
    tree = ast.parse(_PROGRAM.read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    lines: dict[str, set[int]] = {name: set() for name in _ORDER}
    for statement in ast.walk(functions["called"]):
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Compare):
            lines[ast.literal_eval(statement.test.comparators[0])].update(_spanned(statement.body))
    lines["message"].update(_spanned(functions["exchange_messages"].body))
    for statement in functions["train"].body:  # the end comes after the last save, or load
        if "end_training" in ast.unparse(statement):
            lines["load"].add(statement.lineno)
    phase = "backward"
    for statement in functions["one_step"].body:
        text = ast.unparse(statement)
        phase = next((name for beginning, name in _BEGINS.items() if beginning in text), phase)
        if isinstance(statement, ast.For):
            for name in COLLECTIVES:
                lines[name].add(statement.body[0].lineno)  # where a rank comes to it
        else:
            lines[phase].update(_spanned([statement]))
    return lines


def _spanned(statements: list[ast.stmt]) -> range:
    return range(statements[0].lineno, (statements[-1].end_lineno or statements[-1].lineno) + 1)
