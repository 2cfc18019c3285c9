"""Just enough C++ reading for the architecture tests: comments blanked, includes listed, function bodies found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|R"(?P<tag>[^\s()\\]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'""",
    re.DOTALL,
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"\n]+)[>\"]", re.MULTILINE)
_NOT_A_FUNCTION = re.compile(r"\b(namespace|class|struct|enum|union|concept)\b|=\s*$|\bextern\s*\"|^\s*$")
_PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Function:
    """A function body: the line its signature ends on, and the lines from there to its closing brace."""

    line: int
    length: int
    signature: str


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def without_comments(text: str) -> str:
    """``text`` with comments and literals blanked; line numbers stay."""
    return _TOKEN.sub(_blank, text)


def includes(text: str) -> Iterator[tuple[int, str]]:
    """Line number and name of every include."""
    comments_only = re.sub(r"//[^\n]*|/\*.*?\*/", _blank, text, flags=re.DOTALL)
    for match in _INCLUDE.finditer(comments_only):
        yield comments_only.count("\n", 0, match.start()) + 1, match.group(2)


def functions(text: str) -> Iterator[Function]:
    """Every outermost function body; lambdas and control blocks within it count as part of it."""
    code = _PREPROCESSOR.sub(_blank, without_comments(text))
    depth, body_depth, body_start, head_start = 0, None, 0, 0
    signature = ""
    for match in re.finditer(r"[{};]", code):
        position, token = match.start(), match.group()
        if token == "{":
            head = code[head_start:position]
            if body_depth is None and ")" in head and not _NOT_A_FUNCTION.search(_outside_templates(head)):
                body_depth, body_start = depth, position
                signature = " ".join(head.split())
            depth += 1
        elif token == "}":
            depth -= 1
            if body_depth is not None and depth == body_depth:
                first = code.count("\n", 0, body_start) + 1
                yield Function(first, code.count("\n", 0, position) + 2 - first, signature)
                body_depth = None
        head_start = position + 1


def _outside_templates(head: str) -> str:
    """``head`` without its template parameter list and its arguments, which may hold ``class`` and ``struct``."""
    head = re.sub(r"\btemplate\s*<[^{}]*?>", " ", head)
    return re.sub(r"\([^{}]*\)", "()", head, flags=re.DOTALL)
