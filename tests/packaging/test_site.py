"""The documentation as a site: it has all pages, leads somewhere everywhere, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Commands and what tests use have no page; memory_utils is an old place of what utils has.
WITHOUT_PAGE = {"commands", "memory_utils", "test_utils", "utils"}
REMOTE = re.compile(r"""<(?:script|link|img|iframe)[^>]*\s(?:src|href)=["']?(?:https?:)?//""")


def test_every_module_of_the_interface_has_a_page() -> None:
    pages = "".join(page.read_text() for page in REPOSITORY.glob("docs/api/*.rst"))
    documented = set(re.findall(r"^\.\. automodule:: accelerate_cpp\.(\w+)$", pages, re.MULTILINE))
    modules = importlib.import_module("accelerate_cpp")._SUBMODULES
    assert sorted(modules - WITHOUT_PAGE - documented) == [], "add a page to docs/api"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built like `make site`, with warnings as errors."""
    pytest.importorskip("sphinx", reason="pip install -r requirements/docs.txt")
    folder = tmp_path_factory.mktemp("site")
    options = ["-c", "docs", "-b", "html", "-d", str(folder / "doctrees"), "--fail-on-warning", "--keep-going", "-q"]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(folder / "html")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_site_has_every_document(site: Path) -> None:
    sources = [
        *REPOSITORY.glob("docs/**/*.md"),
        *REPOSITORY.glob("notebooks/*.ipynb"),
        *map(REPOSITORY.joinpath, ("README.md", "SECURITY.md", "CHANGELOG.md", "examples/README.md")),
    ]
    pages = [source.relative_to(REPOSITORY).with_suffix(".html") for source in sources]
    assert [page for page in pages if not (site / page).is_file()] == []
    first = re.search(r"url=([^\"]+)", (site / "index.html").read_text())
    assert first is not None
    assert (site / first[1]).is_file()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_site_shows_docstrings(site: Path) -> None:
    for page, name in (
        ("accelerator", "accelerate_cpp.accelerator.Accelerator.prepare"),
        ("optimizer", "accelerate_cpp.MasterWeights"),
        ("utils", "accelerate_cpp.utils.operations.gather"),
        ("utils", "accelerate_cpp.utils.dataclasses.DataLoaderConfiguration"),
    ):
        assert f'id="{name}"' in (site / "docs" / "api" / f"{page}.html").read_text()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_site_has_the_flags_of_commands_and_the_differences_of_examples(site: Path) -> None:
    """They are made while the site is built."""
    assert 'id="cmdoption-accelerate-cpp-launch-num_processes"' in (site / "docs" / "cli.html").read_text()
    gallery = (site / "docs" / "gallery.html").read_text()
    assert '<span class="gi">+             accelerator.backward(loss)  # 4</span>' in gallery
    assert "<!-- " not in gallery.split("<article")[1].split("</article>")[0]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_site_loads_nothing_from_elsewhere(site: Path) -> None:
    assert [page for page in site.rglob("*.html") if REMOTE.search(page.read_text())] == []
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()[\s\"']*(?:url\()?[\"']?(?:https?:)?//[^)]*", styles) == []
