"""The README tells the truth where a test can know it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from accelerate_cpp.config.unsupported import markdown_table

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md")]


def test_the_table_of_what_is_refused_is_the_one_the_package_uses() -> None:
    begin, end = "<!-- unsupported: begin -->\n", "<!-- unsupported: end -->"
    readme = (REPOSITORY / "README.md").read_text()
    shown = readme.split(begin)[1].split(end)[0]
    assert shown == markdown_table(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
