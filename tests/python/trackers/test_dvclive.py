"""DVCLive, of which a double records what it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.trackers.dvclive import DVCLiveTracker

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(double: Callable[..., Calls]) -> Calls:
    """What dvclive is told."""
    return double("dvclive")


@pytest.fixture
def tracker(calls: Calls) -> DVCLiveTracker:
    """One that has been started."""
    made = DVCLiveTracker()
    made.start()
    calls.clear()
    return made


def test_start_makes_what_logs_with_the_options(calls: Calls) -> None:
    made = DVCLiveTracker("without effect", dir="metrics")
    assert calls == []
    made.start()
    assert calls == [("dvclive.Live", {"dir": "metrics"})]
    assert repr(made.tracker) == repr(made.live) == "<dvclive.Live()>"


def test_one_that_is_given_is_used(calls: Calls) -> None:
    given = object()
    made = DVCLiveTracker("run", live=given)
    made.start()
    assert made.tracker is given
    assert calls == []


def test_values_are_logged_one_by_one_and_the_step_goes_on(tracker: DVCLiveTracker, calls: Calls) -> None:
    tracker.log({"loss": torch.tensor(0.5), "note": "hello", "eval": {"a": 1}}, step=3, plot=False)
    assert calls == [
        ("dvclive.Live().step =", 3),
        ("dvclive.Live().log_metric", "loss", 0.5, {"plot": False}),
        ("dvclive.Live().log_metric", "note", "hello", {"plot": False}),
        ("dvclive.Live().log_metric", "eval/a", 1, {"plot": False}),
        ("dvclive.Live().next_step",),
    ]


def test_without_a_step_dvclive_counts(tracker: DVCLiveTracker, calls: Calls) -> None:
    tracker.log({"loss": 1})
    assert calls == [("dvclive.Live().log_metric", "loss", 1), ("dvclive.Live().next_step",)]


def test_what_is_no_number_or_text_is_left_out_aloud(tracker: DVCLiveTracker, calls: Calls) -> None:
    with pytest.warns(UserWarning, match="dvclive leaves out 'curve'"):
        tracker.log({"curve": torch.zeros(3)})
    assert calls == [("dvclive.Live().next_step",)]


def test_parameters_are_what_yaml_knows_and_the_end_is_told(tracker: DVCLiveTracker, calls: Calls) -> None:
    tracker.store_init_configuration({"lr": 0.1, "out": Path("out")})
    tracker.finish()
    assert calls == [("dvclive.Live().log_params", {"lr": 0.1, "out": "out"}), ("dvclive.Live().end",)]


def test_on_other_processes_nothing_happens(calls: Calls, on_main: Callable[[bool], None]) -> None:
    on_main(False)
    made = DVCLiveTracker()
    made.start()
    made.store_init_configuration({"lr": 1})
    made.log({"loss": 1}, step=1)
    made.finish()
    assert calls == []


def test_it_needs_the_library_and_a_start(not_installed: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match="not been started"):
        DVCLiveTracker().log({"loss": 1})
    not_installed("dvclive")
    with pytest.raises(MissingLibrary, match="pip install dvclive"):
        DVCLiveTracker().start()
