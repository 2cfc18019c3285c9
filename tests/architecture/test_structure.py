"""docs/architecture.md says what is there: its list of folders, and the files that it names."""

from __future__ import annotations

import re

import structure_report as report
from tree import PACKAGE, REPOSITORY


def test_the_list_of_folders_is_up_to_date() -> None:
    found = (REPOSITORY / report.DOCUMENT).read_text()
    assert found == report.document(REPOSITORY), "run python tests/architecture/structure_report.py --write"


def test_the_files_that_it_names_exist() -> None:
    named = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|cpp|h))`", (REPOSITORY / report.DOCUMENT).read_text())
    package = REPOSITORY / PACKAGE
    homes = (package, REPOSITORY, REPOSITORY / "csrc")
    missing = [name for name in named if not any((home / name).is_file() for home in homes)]
    missing = [name for name in missing if not any(package.rglob(name))]
    assert len(named) > 30
    assert missing == []
