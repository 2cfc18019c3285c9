"""The two places that name what the package needs beside torch say the same."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_environment_of_a_clone_has_what_the_wheel_asks_for() -> None:
    listed = re.search(r"^dependencies = \[(.*)\]$", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed is not None
    rows = (REPOSITORY / "requirements/runtime.txt").read_text().splitlines()
    assert re.findall(r'"([^"]+)"', listed[1]) == [row for row in rows if not row.startswith("#")]
