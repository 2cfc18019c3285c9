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
    boxes = code(REPOSITORY / "README.md")
    assert len(boxes) >= 5
    assert code(page) == boxes


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_figures_of_a_translation_are_those_of_the_readme(page: Path) -> None:
    figures = re.findall(r"\| (0\.\d+) \|", (REPOSITORY / "README.md").read_text())
    assert len(figures) >= 5
    assert re.findall(r"\| (0\.\d+) \|", page.read_text()) == figures


def test_there_are_two_translations() -> None:
    assert len(TRANSLATIONS) == 2
