"""Comet, of which a double records what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.trackers.comet import CometMLTracker

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(double: Callable[..., Calls]) -> Calls:
    """What comet_ml is told."""
    return double("comet_ml")


@pytest.fixture
def tracker(calls: Calls) -> CometMLTracker:
    """One that has been started."""
    made = CometMLTracker("project")
    made.start()
    calls.clear()
    return made


def test_an_experiment_begins_with_project_and_options(calls: Calls) -> None:
    made = CometMLTracker("project", workspace="team")
    assert calls == []
    made.start()
    assert calls == [("comet_ml.start", {"project_name": "project", "workspace": "team"})]
    assert repr(made.tracker) == repr(made.writer) == "<comet_ml.start()>"


def test_older_versions_make_the_experiment_themselves(double: Callable[..., Calls]) -> None:
    calls = double("comet_ml", absent=("start",))
    CometMLTracker("project", project_name="another").start()
    assert calls == [("comet_ml.Experiment", {"project_name": "another"})]


def test_each_kind_of_value_has_its_place(tracker: CometMLTracker, calls: Calls) -> None:
    values = {"loss": torch.tensor(0.5), "note": "hello", "eval": {"a": 1, "b": 2}}
    tracker.log(values, step=3, epoch=1)
    experiment = "comet_ml.start()"
    assert calls == [
        (f"{experiment}.set_step", 3),
        (f"{experiment}.log_metric", "loss", 0.5, {"step": 3, "epoch": 1}),
        (f"{experiment}.log_other", "note", "hello", {"epoch": 1}),
        (f"{experiment}.log_metrics", {"a": 1, "b": 2}, {"step": 3, "epoch": 1}),
    ]


def test_without_a_step_the_experiment_counts(tracker: CometMLTracker, calls: Calls) -> None:
    tracker.log({"loss": 1})
    assert calls == [("comet_ml.start().log_metric", "loss", 1, {"step": None})]


def test_what_is_nothing_of_these_is_left_out_aloud(tracker: CometMLTracker, calls: Calls) -> None:
    with pytest.warns(UserWarning, match="comet_ml leaves out 'curve'"):
        tracker.log({"curve": torch.zeros(3), "loss": 1})
    assert [call[1] for call in calls] == ["loss"]


def test_parameters_and_the_end(tracker: CometMLTracker, calls: Calls) -> None:
    tracker.store_init_configuration({"lr": 0.1})
    tracker.finish()
    assert calls == [("comet_ml.start().log_parameters", {"lr": 0.1}), ("comet_ml.start().end",)]


def test_on_other_processes_nothing_happens(calls: Calls, on_main: Callable[[bool], None]) -> None:
    on_main(False)
    made = CometMLTracker("project")
    made.start()
    made.store_init_configuration({"lr": 1})
    made.log({"loss": 1}, step=1)
    made.finish()
    assert calls == []


def test_it_needs_the_library_and_a_start(not_installed: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match="not been started"):
        CometMLTracker("project").log({"loss": 1})
    not_installed("comet_ml")
    with pytest.raises(MissingLibrary, match="pip install comet-ml"):
        CometMLTracker("project").start()
