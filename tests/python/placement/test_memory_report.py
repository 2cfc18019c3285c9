"""What estimate-memory prints and draws."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.placement.memory_report import Report, checked_picture, draw, size, text

MIB = 2**20
PARTS = {"weights": MIB, "gradients": MIB, "optimizer states": 2 * MIB, "activations": 4 * MIB}
REPORT = Report(
    name="folder",
    title="Net of timm",
    parameters=262144,
    setting="adam and batches of 1",
    stored={"float32": (MIB // 2, MIB), "int4": (MIB // 16, MIB // 8)},
    training={"float32": PARTS, "float16": {**PARTS, "activations": 0}},
)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 * MIB, "5.00 MiB"), (2**31, "2.00 GiB"), (2**41, "2.00 TiB")],
)
def test_sizes_have_a_unit(count: int, shown: str) -> None:
    assert size(count) == shown


def test_the_tables_have_every_figure() -> None:
    lines = text(REPORT).splitlines()
    assert lines[0] == "folder: Net of timm, 262,144 parameters"
    assert lines[2:5] == [
        "dtype    largest layer  total size",
        "float32     512.00 KiB    1.00 MiB",
        "int4         64.00 KiB  128.00 KiB",
    ]
    assert lines[6] == "Training with adam and batches of 1:"
    assert lines[8].split() == ["float32", "1.00", "MiB", "1.00", "MiB", "2.00", "MiB", "4.00", "MiB", "8.00", "MiB"]


def test_bars_are_as_long_as_the_bytes() -> None:
    whole, part = (line for line in text(REPORT).splitlines() if "█" in line and "░ activations" not in line)
    assert [whole.count(mark) * 8 / 60 for mark in "█▓▒░"] == pytest.approx([1, 1, 2, 4], abs=0.14)
    assert sum(part.count(mark) for mark in "█▓▒░") == 30


def test_bars_are_plain_where_blocks_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    shown = text(REPORT)
    shown.encode("ascii")
    assert "# weights  = gradients  - optimizer states  . activations" in shown


def test_what_is_not_known_is_said() -> None:
    training = {"float32": {**PARTS, "activations": None}}
    shown = text(replace(REPORT, training=training, failure="ValueError: no"))
    row = next(line for line in shown.splitlines() if line.startswith("float32") and "?" in line)
    assert row.endswith("?  over 4.00 MiB")
    assert "Activations are not known: a forward pass without data fails (ValueError: no)." in shown


def test_without_training_there_are_no_bars() -> None:
    assert "Training" not in text(replace(REPORT, training={}))


@pytest.mark.parametrize("training", [REPORT.training, {}])
def test_a_picture_is_drawn(training: dict[str, dict[str, int | None]], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = checked_picture(tmp_path / "memory.png")
    draw(replace(REPORT, training=training), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_drawn_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidArgument, match=r"expected a name that ends in one of .*\.png"):
        checked_picture(tmp_path / "memory.doc")
    with pytest.raises(InvalidArgument, match="there is no folder"):
        checked_picture(tmp_path / "none" / "memory.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InvalidArgument, match="cannot be written"):
        draw(REPORT, tmp_path / "folder.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingLibrary, match="needs the Python package matplotlib"):
        checked_picture(tmp_path / "memory.png")
