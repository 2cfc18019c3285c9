"""Every input that is kept is parsed once: what fuzzing has found stays mended. It takes no fuzzer."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fuzz_targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(path for path in CORPUS.glob("*/*") if path.parent.name in TARGETS)


def test_every_target_has_inputs() -> None:
    assert {path.parent.name for path in KEPT} == set(TARGETS)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input_is_parsed_or_refused_with_a_sentence(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TARGETS[path.parent.name].run(path.read_bytes())
