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
    page = (REPOSITORY / "docs" / "refusals.md").read_text()
    shown = page.split(begin)[1].split(end)[0]
    assert shown == markdown_table(), "run `make docs`"


def test_readme_is_short_enough_to_be_read_to_its_end() -> None:
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def test_index_lists_all_documents_in_the_known_order() -> None:
    """Once as links, which any reader of Markdown follows, and once as the site's tables of contents."""
    index = REPOSITORY / "docs" / "index.md"
    order = ["Quick tour", "Tutorials", "How-to guides", "Concepts", "Reference", "Project"]
    assert re.findall(r"^## (.+)$", index.read_text(), re.MULTILINE) == order
    assert re.findall(r"^:caption: (.+)$", index.read_text(), re.MULTILINE) == order
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)", index.read_text())}
    assert [page for page in sorted(index.parent.rglob("*.md")) if page not in {index, *linked}] == []


def test_readme_leads_to_the_state_of_gpus_first() -> None:
    """The first row of the table of what works is about GPUs, and links to the page about them."""
    table = (REPOSITORY / "README.md").read_text().split("\n## What works\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    assert rows[0].startswith("| GPUs |")
    assert "docs/gpu.md" in rows[0]


def test_benchmarks_that_are_quoted_exist() -> None:
    """Every program of a command in the README's figures and on their page is in the repository."""
    figures = (REPOSITORY / "README.md").read_text().split("`python benchmarks/…`")[1]
    quoted = set(re.findall(r"`([a-z_]+\.py) --", figures))
    assert len(quoted) >= 5
    quoted |= set(re.findall(r"python benchmarks/([a-z_]+\.py)", (REPOSITORY / "docs/benchmarks.md").read_text()))
    assert sorted(name for name in quoted if not (REPOSITORY / "benchmarks" / name).is_file()) == []


def test_figures_of_the_readme_are_those_of_the_benchmarks_page() -> None:
    readme, page = ((REPOSITORY / name).read_text() for name in ("README.md", "docs/benchmarks.md"))
    figures = re.findall(r"^\|[^|]+\|[^|]+\| (0\.\d+) \|", readme, re.MULTILINE)
    assert len(figures) >= 5
    assert [figure for figure in figures if not re.search(rf"\| {re.escape(figure)} \|", page)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
