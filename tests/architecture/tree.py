"""The files that the architecture tests look at, and what a violation is."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "python/accelerate_cpp"
CXX_SUFFIXES = {".h", ".cpp"}
ROOT_FOLDERS = {"utils", "commands", "test_utils", "check"}


@dataclass(frozen=True, order=True)
class Violation:
    """A broken rule: which file (relative to the repository), which line (0 for the whole file) and what is wrong."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}" if self.line else f"{self.path}: {self.message}"


def project_files(root: Path) -> list[Path]:
    """The files of the project below ``root``, relative to it: all that git tracks or would; without git, all."""
    if not (root / ".git").exists():
        return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())
    listing = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return sorted({Path(name) for name in listing.split("\0") if name and (root / name).is_file()})


def cxx_files(root: Path, folder: str) -> list[Path]:
    """C++ headers and sources of the project below ``folder``, relative to ``root``."""
    return [path for path in project_files(root) if path.suffix in CXX_SUFFIXES and path.is_relative_to(folder)]


def python_files(root: Path, folder: str) -> list[Path]:
    """Python files of the project below ``folder``, relative to ``root``."""
    return [path for path in project_files(root) if path.suffix == ".py" and path.is_relative_to(folder)]


def is_root_file(path: Path) -> bool:
    """Whether a file of the package is of the drop-in surface: directly in the package, or in one of its folders."""
    inside = path.relative_to(PACKAGE).parts
    return len(inside) == 1 or inside[0] in ROOT_FOLDERS


@cache
def parse(file: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(file.read_text(), filename=str(file))


def render(violations: list[Violation]) -> str:
    """The violations as the message of a failed assertion."""
    return "\n" + "\n".join(str(violation) for violation in sorted(violations))
