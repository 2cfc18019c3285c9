"""Whether a long example has in it what shorter ones show."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from accelerate_cpp.errors import InvalidArgument

__all__ = ["compare_against_test"]

_DEFAULT = "examples/nlp_example.py"


def compare_against_test(
    base_filename: str | os.PathLike[str],
    feature_filename: str | os.PathLike[str],
    parser_only: bool,
    secondary_filename: str | os.PathLike[str] | None = None,
) -> list[str]:
    """The lines of code that ``feature_filename`` adds to the plain example and that ``base_filename`` lacks.

    Args:
        base_filename: the script that should have all features.
        feature_filename: the script that shows one.
        parser_only: look at the functions ``main``, which parse arguments; else at ``training_function``.
        secondary_filename: the plain script; ``None`` for ``examples/nlp_example.py`` from the working folder.

    Returns:
        Each with its indentation and the end of the line, in their order. Comments and empty lines do not count.

    Raises:
        InvalidArgument: one of the scripts has no such function.
    """
    function = "main" if parser_only else "training_function"
    plain, base, feature = (
        _lines_of(function, Path(name)) for name in (secondary_filename or _DEFAULT, base_filename, feature_filename)
    )
    known = {*plain, *base}
    return [line for line in feature if line not in known]


def _lines_of(function: str, path: Path) -> list[str]:
    """The lines of code of ``function`` in the script ``path``."""
    text = path.read_text(encoding="utf-8")
    for node in ast.parse(text, filename=str(path)).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            return [f"{line}\n" for line in lines if line.strip() and not line.lstrip().startswith("#")]
    raise InvalidArgument(f"{path}: expected a function {function}, but there is none")
