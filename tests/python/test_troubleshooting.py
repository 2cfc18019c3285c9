"""Every message that docs/troubleshooting.md quotes exists in the sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "troubleshooting.md"
LEFT_OUT = "…"
TELLING_LETTERS = 9  # of the longest piece of a message: less could stand anywhere
CXX_TEXTS = re.compile(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+')


def python_texts(source: str) -> Iterator[str]:
    """The texts in a Python file; of one with values in it, the parts between them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def cxx_texts(source: str) -> Iterator[str]:
    """The texts in a C++ file, with those that stand beside each other joined."""
    for found in CXX_TEXTS.finditer(source):
        yield re.sub(r'"\s*"', "", found[0].strip())[1:-1].replace("\\n", "\n").replace('\\"', '"')


@cache
def sources() -> dict[str, tuple[str, ...]]:
    """The texts in each file of the package, its core and its build."""
    found = {}
    for folder, suffixes in (("python", (".py",)), ("build_backend", (".py",)), ("csrc", (".h", ".cpp"))):
        for path in sorted((REPOSITORY / folder).rglob("*")):
            if path.suffix in suffixes:
                texts = python_texts if path.suffix == ".py" else cxx_texts
                found[str(path.relative_to(REPOSITORY))] = tuple(texts(path.read_text()))
    return found


def quoted(page: str) -> list[str]:
    """The messages in the boxes of a page, one a line."""
    return [
        line for box in re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for line in box.splitlines()
    ]


def pieces_of(message: str) -> list[str]:
    """What stands between the parts that differ."""
    return [piece.strip() for piece in message.split(LEFT_OUT) if re.search(r"\w", piece)]


def files_with(message: str) -> list[str]:
    """The files whose texts have all pieces of a message."""
    pieces = pieces_of(message)
    return [file for file, texts in sources().items() if all(any(piece in text for text in texts) for piece in pieces)]


@pytest.mark.parametrize("message", quoted(PAGE.read_text()))
def test_quoted_message_is_one_of_the_package(message: str) -> None:
    assert max(map(len, pieces_of(message))) >= TELLING_LETTERS
    assert files_with(message) != []


def test_page_quotes_many_messages() -> None:
    assert len(quoted(PAGE.read_text())) > 80


def test_messages_are_taken_from_the_boxes_of_a_page() -> None:
    page = "# Title\n\n```bash\nls\n```\n\n```text\none … two\nthree\n```\n\ntext\n\n```text\nfour\n```\n"
    assert quoted(page) == ["one … two", "three", "four"]
    assert pieces_of("… is lost: …, on rank …") == ["is lost:", ", on rank"]


def test_texts_are_found_in_pieces_and_across_lines() -> None:
    assert "rank left" in list(python_texts('raise E(\n    f"{who}: "\n    "rank "\n    "left"\n)\n'))[-1]
    assert list(cxx_texts('throw E(who + ": rank "\n        "left" + x);')) == [": rank left"]


def test_invented_message_is_not_found() -> None:
    known = "waited … for an asynchronous operation; it goes on, and can be waited for again"
    assert files_with(known) == ["csrc/core/comm/work_queue.cpp"]
    assert files_with(f"{known} … the light of the moon") == []
