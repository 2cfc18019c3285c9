"""Sphinx's settings for `make site`, which builds the documentation into out/site without a network.

The root of the repository is the source folder, so that links between README.md and docs/ lead to the same files here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import accelerate_cpp
from accelerate_cpp import utils

sys.path.insert(0, str(Path(__file__).parent))
import command_reference
import example_gallery

# A Markdown link to something of the repository.
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)[^)]*\)")
COLON = "\N{RATIO}\N{NO-BREAK SPACE}"

project = "accelerate-cpp"
copyright = "the authors of accelerate-cpp, Apache-2.0"
version = release = accelerate_cpp.__version__
language = "en"

root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
include_patterns += ["docs/**", "examples/README.md", "notebooks/*.ipynb"]
exclude_patterns = [".*", "build", "csrc", "out", "python", "tests"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]  # myst_nb reads Markdown and notebooks
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext"}

myst_heading_anchors = 3
# Notebooks are shown with the outputs that are stored in them, whatever these are. Widgets have no kernel here: their
# text is shown, and the scripts that would draw them, which come from elsewhere, are left out.
nb_execution_mode = "off"
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
suppress_warnings = ["mystnb.unknown_mime_type"]
napoleon_numpy_docstring = False
napoleon_preprocess_types = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"accelerate-cpp {release}"
html_copy_source = False
html_show_sphinx = False


def without_folders(app: Any, docname: str, source: list[str]) -> None:
    """Leaves out links to folders, for which the site has no page."""
    here = Path(app.env.doc2path(docname)).parent

    def keep(link: re.Match[str]) -> str:
        return link[1] if (here / link[2]).is_dir() else link[0]

    if app.env.doc2path(docname).suffix == ".md":
        source[0] = LINK.sub(keep, source[0])


def generate(app: Any, docname: str, source: list[str]) -> None:
    """Puts the flags of commands and the gallery of examples into the pages that ask for them."""
    if docname == "docs/cli":
        source[0] = command_reference.with_flags(source[0])
    elif docname == "docs/gallery":
        source[0] = example_gallery.with_examples(source[0])


def list_utilities(app: Any, docname: str, source: list[str]) -> None:
    """Gives each module of ``accelerate_cpp.utils`` with public names a section of the page about them."""
    if docname != "docs/api/utils":
        return
    for module, names in sorted(utils._NAMES.items()):  # named as inside the package
        members = ", ".join(name for name in names if name != "ParallelismConfig")  # it has a page of its own
        source[0] += f"\n{module}\n{'-' * len(module)}\n\n.. automodule:: accelerate_cpp.{module}\n"
        source[0] += f"   :members: {members}\n"


def hide_colon(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon, which would take a type from a first sentence of an attribute such as "What it is: ..."."""
    if what in ("attribute", "data", "property"):
        lines[:1] = [line.replace(": ", COLON) for line in lines[:1]]


def show_colon(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """After napoleon."""
    lines[:] = [line.replace(COLON, ": ") for line in lines]


def lead_to_root_doc(app: Any, exception: Exception | None) -> None:
    """Has the folder of the site open at its first page."""
    if exception is None:
        first = f"{root_doc}.html"
        Path(app.outdir, "index.html").write_text(
            f'<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={first}">'
            f'<a href="{first}">{project}</a>\n'
        )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", without_folders)
    app.connect("source-read", list_utilities)
    app.connect("source-read", generate)
    app.connect("autodoc-process-docstring", hide_colon, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", show_colon, priority=600)
    app.connect("build-finished", lead_to_root_doc)
