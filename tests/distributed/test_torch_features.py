"""torch's own distributed features on backend shm, each compared with one process or with what the ranks must get."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from features_table import FEATURES
from torch_features import DOCUMENT, document, failures, run, run_features

# Many checks share one start of processes: importing torch takes longer than most of them.
pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * 1500)]

# Backend, number of processes, and whether the checks are long.
Start = tuple[str, int, bool]


def cases(backend: str) -> list[Any]:
    """Every feature with the start that it shares. On Gloo, where the checks prove themselves, all are long."""
    return [
        pytest.param(
            (backend, feature.processes, feature.long),
            name,
            marks=[pytest.mark.long] if feature.long or backend == "gloo" else [],
            id=name,
        )
        for name, feature in FEATURES.items()
        if feature.gloo or backend != "gloo"
    ]


@pytest.fixture(scope="module")
def failure(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Start, str], str]:
    """What went wrong with a feature. The first to ask for one of a start runs all the selected ones of this start."""
    found: dict[Start, dict[str, str]] = {}
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]

    def of(start: Start, name: str) -> str:
        if start not in found:
            backend, processes, _ = start
            names = [case["name"] for case in selected if case.get("start") == start]
            found[start] = failures(run_features, processes, backend, names, tmp_path_factory.mktemp("features"))
        return found[start][name]

    return of


@pytest.mark.parametrize(("start", "name"), cases("shm"))
def test_torch_feature(failure: Callable[[Start, str], str], start: Start, name: str) -> None:
    assert not failure(start, name), failure(start, name)


@pytest.mark.parametrize(("start", "name"), cases("gloo"))
def test_the_check_holds_on_gloo(failure: Callable[[Start, str], str], start: Start, name: str) -> None:
    assert not failure(start, name), failure(start, name)


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == document(), "run: python tests/distributed/torch_features.py"


def succeed(ranks: Any) -> None:
    assert ranks.size == 2


def fail_on_one_rank(ranks: Any) -> None:
    assert ranks.rank == 0, "planted"


def end_the_process(ranks: Any) -> None:
    if ranks.rank == 1:
        os._exit(3)


PLANTED = {function.__name__: function for function in (succeed, fail_on_one_rank, end_the_process)}


def run_planted(backend: str, names: Sequence[str], folder: str) -> None:
    run({name: PLANTED[name.split()[0]] for name in names}, backend, folder)


def test_failures_and_deaths_are_reported_and_the_other_checks_still_run(tmp_path: Path) -> None:
    names = ["succeed", "fail_on_one_rank", "end_the_process", "succeed afterwards"]
    found = failures(run_planted, 2, "gloo", names, tmp_path)
    assert list(found) == names
    assert found["succeed"] == found["succeed afterwards"] == ""
    assert "planted" in found["fail_on_one_rank"]
    assert "rank 0:" not in found["fail_on_one_rank"]
    assert "rank 1 ended with 3" in found["end_the_process"]
