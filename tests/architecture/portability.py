"""Nothing in the project points at one machine or at one package registry."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tree import Violation, project_files

# Joined here, so that this file passes its own check.
MACHINE_FOLDERS = ("work", "farm", "root", "home", "Users", "opt", "mnt")
MACHINE_PATH = re.compile(rf"(?:^|[^\w.~/)\]}}$-])/(?:{'|'.join(MACHINE_FOLDERS)})/[\w.]")
REGISTRIES = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("anaconda", "org"),
        ("deb", "debian", "org"),
        ("npmjs", "org"),
    )
)
BINARY_SUFFIXES = {".png", ".gif", ".ico", ".pdf"}


def violations(root: Path) -> Iterator[Violation]:
    """Machine paths and registry hosts in text files."""
    for path in project_files(root):
        if path.suffix in BINARY_SUFFIXES:
            continue
        text = (root / path).read_text(encoding="utf-8", errors="replace")  # inputs of fuzzing may be any bytes
        for number, line in enumerate(text.splitlines(), start=1):
            if MACHINE_PATH.search(line):
                yield Violation(str(path), number, f"machine path: {line.strip()[:80]}")
            for host in REGISTRIES:
                if host in line:
                    yield Violation(str(path), number, f"package registry {host}: leave the choice to pip's settings")
