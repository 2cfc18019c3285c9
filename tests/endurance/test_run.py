"""What is told of endless runs: which of them grow, which become slower, and their picture."""

from __future__ import annotations

from pathlib import Path

import pytest

import run as endless
from growth import FEWEST
from watched import Run, Series


def made(step_seconds: list[float], descriptors: list[int]) -> Run:
    count = len(step_seconds)
    series = Series("rank1", list(map(float, range(count))), list(range(count)), list(range(count)), step_seconds)
    series.measures = {name: descriptors if name == "descriptors" else [5] * count for name in series.measures}
    return Run("2 ranks", [series])


STEADY = made([0.010] * FEWEST, [7] * FEWEST)


def test_steps_that_take_longer_and_longer_are_told() -> None:
    slower = made([0.010 + 0.002 * place for place in range(FEWEST)], [7] * FEWEST)
    assert endless.slowing([STEADY]) == []
    assert endless.slowing([STEADY, slower]) == ["2 ranks: rank1: a step took 18.0 ms, and 30.0 ms later"]


def test_a_line_says_which_measure_grows() -> None:
    lines = endless.table([STEADY, made([0.010] * FEWEST, list(range(FEWEST)))]).splitlines()
    growing = [line for line in lines if line.startswith("  GROWS")]
    assert [line.split(": ")[0] for line in growing] == ["  GROWS  rank1, descriptors"]
    assert lines[0] == f"2 ranks: {FEWEST - 1} operations, {FEWEST - 1} s"


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    endless.plot([STEADY], tmp_path / "endurance.png")
    assert (tmp_path / "endurance.png").read_bytes().startswith(b"\x89PNG")
