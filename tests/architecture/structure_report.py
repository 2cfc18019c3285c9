"""Figures of how the project is built, printed by ``python tests/architecture/structure_report.py``.

With ``--write`` it brings the list of folders in docs/architecture.md up to date: the first sentence of each package.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import layering
import structure
from tree import PACKAGE, REPOSITORY, cxx_files, parse, python_files

BEGIN, END = "<!-- folders: begin -->\n", "<!-- folders: end -->"
DOCUMENT = "docs/architecture.md"


def folder_table(root: Path) -> str:
    """The folders of the package, from above to below, with the first sentence of the docstring of each."""
    rows = ["| folder | what is in it |", "|---|---|"]
    for rooms in layering.PYTHON_LAYERS:
        for room in rooms:
            path = Path(PACKAGE, room, "__init__.py")
            if room and (root / path).is_file():
                text = " ".join((ast.get_docstring(parse(root / path)) or "").split("\n\n")[0].split())
                rows.append(f"| `{room}/` | {text} |")
    return "\n".join(rows) + "\n"


def document(root: Path) -> str:
    """docs/architecture.md with the list as it should be."""
    pattern = re.escape(BEGIN) + ".*" + re.escape(END)
    return re.sub(pattern, lambda _: BEGIN + folder_table(root) + END, (root / DOCUMENT).read_text(), flags=re.DOTALL)


def main() -> None:
    """Prints the figures, or writes the list."""
    if "--write" in sys.argv[1:]:
        (REPOSITORY / DOCUMENT).write_text(document(REPOSITORY))
        return
    print(f"{'folder':<14}{'files':>6}{'lines':>8}")
    for folder, (files, lines) in structure.folder_sizes(REPOSITORY).items():
        print(f"{folder or '(root)':<14}{files:>6}{lines:>8}")
    small = [path for path in python_files(REPOSITORY, PACKAGE) if _lines(path) <= 60 and path.name != "__init__.py"]
    graph = structure.import_graph(REPOSITORY)
    readme = (REPOSITORY / "README.md").read_text().splitlines()
    print(f"Python files of 60 lines or fewer: {len(small)}")
    print(f"cycles of imports: {len(structure.cycles(graph))}")
    print(f"imports that point upwards: {len(list(layering.import_violations(REPOSITORY)))}, all folders looked at")
    print(f"includes that point upwards in csrc/core: {len(list(layering.core_violations(REPOSITORY)))}")
    print(f"lines of C++ in csrc: {sum(_lines(path) for path in cxx_files(REPOSITORY, 'csrc'))}")
    print(f"README: {len(readme)} lines, the longest of {max(map(len, readme))} characters")


def _lines(path: Path) -> int:
    return (REPOSITORY / path).read_text().count("\n")


if __name__ == "__main__":
    main()
