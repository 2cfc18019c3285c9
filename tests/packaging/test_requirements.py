"""The two places that name what the package needs beside torch say the same."""

from __future__ import annotations

import re
from email import message_from_string
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def test_the_environment_of_a_clone_has_what_the_wheel_asks_for() -> None:
    listed = re.search(r"^dependencies = \[(.*)\]$", (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed is not None
    rows = (REPOSITORY / "requirements/runtime.txt").read_text().splitlines()
    assert re.findall(r'"([^"]+)"', listed[1]) == [row for row in rows if not row.startswith("#")]


def test_what_the_alias_shows_of_itself_is_true_of_this_package() -> None:
    (folder,) = (REPOSITORY / "python/accelerate_cpp/alias/distribution").iterdir()
    shown = message_from_string((folder / "PKG-INFO").read_text())
    own = (REPOSITORY / "pyproject.toml").read_text()
    assert f'requires-python = "{shown["Requires-Python"]}"' in own
    assert f'license = "{shown["License"]}"' in own
    rows = (REPOSITORY / "requirements/runtime.txt").read_text().splitlines()
    assert {*shown.get_all("Requires-Dist", [])} - {*rows} == {"accelerate-cpp", "torch"}
    assert (folder / "requires.txt").read_text().splitlines() == shown.get_all("Requires-Dist")
    for classifier in shown.get_all("Classifier", []):
        assert f'"{classifier}"' in own or classifier == "License :: OSI Approved :: Apache Software License"
    recorded = [row.split(",")[0] for row in (folder / "RECORD").read_text().splitlines()]
    assert recorded == sorted(f"{folder.name}/{path.name}" for path in folder.iterdir())
