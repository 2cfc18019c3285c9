"""The translated quickstarts show the same commands and code as the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TRANSLATIONS = sorted(REPOSITORY.glob("docs/quickstart.*.md"))


def code(page: Path) -> list[list[str]]:
    """The lines of each box, without comments, which are translated."""
    boxes = re.findall(r"^```\w+\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [[re.sub(r"\s*#.*", "", line) for line in box.splitlines()] for box in boxes]


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_code_of_a_translation_is_that_of_the_readme(page: Path) -> None:
    known = {line for box in code(REPOSITORY / "README.md") for line in box}
    assert [line for box in code(page) for line in box if line not in known] == []


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_translation_begins_as_the_readme_does(page: Path) -> None:
    beginning = code(REPOSITORY / "README.md")[:4]
    assert code(page)[:4] == beginning


def test_translations_agree() -> None:
    assert len(TRANSLATIONS) == 2
    assert code(TRANSLATIONS[0]) == code(TRANSLATIONS[1])
