"""Weights & Biases, Trackio and SwanLab, of which doubles record what they are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.trackers.runs import RunTracker, SwanLabTracker, TrackioTracker, WandBTracker

KINDS = [WandBTracker, TrackioTracker, SwanLabTracker]
WITH_IMAGES = [WandBTracker, SwanLabTracker]
Calls = list[tuple[Any, ...]]


def started(kind: type[RunTracker], calls: Calls, **options: Any) -> RunTracker:
    tracker = kind("project", **options)
    assert calls == [], "nothing begins before start"
    tracker.start()
    return tracker


def new(calls: Calls, action: Callable[[], Any]) -> Calls:
    """What ``action`` calls."""
    before = len(calls)
    action()
    return calls[before:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_begins_with_the_project_and_the_options(kind: type[RunTracker], double: Callable[..., Calls]) -> None:
    calls, name = double(kind.name), kind.name
    tracker = started(kind, calls, group="ablation")
    assert calls[0] == (f"{name}.init", {"project": "project", "group": "ablation"})
    assert repr(tracker.tracker) == f"<{name}.init()>"
    assert tracker.tracker is tracker.run
    assert new(calls, tracker.finish) == [(f"{name}.init().finish",)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_option_for_the_project_wins(kind: type[RunTracker], double: Callable[..., Calls]) -> None:
    calls = double(kind.name)
    started(kind, calls, project="another")
    assert calls[0] == (f"{kind.name}.init", {"project": "another"})


@pytest.mark.parametrize("kind", KINDS)
def test_values_reach_the_run_with_step_and_options_and_tensors_as_numbers(
    kind: type[RunTracker], double: Callable[..., Calls]
) -> None:
    calls = double(kind.name)
    tracker = started(kind, calls)
    table = object()
    values = {"loss": torch.tensor(0.5), "text": "hello", "table": table}
    assert new(calls, lambda: tracker.log(values, step=3, commit=False)) == [
        (f"{kind.name}.init().log", {"loss": 0.5, "text": "hello", "table": table}, {"step": 3, "commit": False})
    ]
    assert new(calls, lambda: tracker.log({"loss": 1})) == [(f"{kind.name}.init().log", {"loss": 1}, {"step": None})]


@pytest.mark.parametrize(
    ("kind", "options"), [(WandBTracker, ({"allow_val_change": True},)), (TrackioTracker, ()), (SwanLabTracker, ())]
)
def test_the_configuration_goes_to_the_run(
    kind: type[RunTracker], options: tuple[Any, ...], double: Callable[..., Calls]
) -> None:
    calls = double(kind.name)
    tracker = started(kind, calls)
    assert new(calls, lambda: tracker.store_init_configuration({"lr": 0.1})) == [
        (f"{kind.name}.init().config.update", {"lr": 0.1}, *options)
    ]


def test_swanlab_is_told_which_program_made_the_run(double: Callable[..., Calls]) -> None:
    calls = double("swanlab")
    started(SwanLabTracker, calls)
    assert calls[1:] == [("swanlab.init().config.update", {"FRAMEWORK": "accelerate_cpp"})]


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_images_are_made_images_of_the_library(kind: type[Any], double: Callable[..., Calls]) -> None:
    calls = double(kind.name)
    tracker: Any = started(kind, calls)
    first, second, logged = new(calls, lambda: tracker.log_images({"samples": ["a", "b"]}, step=4, commit=False))
    assert [first, second] == [(f"{kind.name}.Image", "a"), (f"{kind.name}.Image", "b")]
    assert logged[0] == f"{kind.name}.init().log"
    assert [repr(image) for image in logged[1]["samples"]] == [f"<{kind.name}.Image()>"] * 2
    assert logged[2] == {"step": 4, "commit": False}


def test_a_table_is_made_a_table_of_wandb(double: Callable[..., Calls]) -> None:
    calls = double("wandb")
    tracker: Any = started(WandBTracker, calls)
    made, logged = new(calls, lambda: tracker.log_table("results", columns=["a"], data=[[1]], step=5))
    assert made == ("wandb.Table", {"columns": ["a"], "data": [[1]], "dataframe": None})
    assert (logged[0], repr(logged[1]["results"]), logged[2]) == ("wandb.init().log", "<wandb.Table()>", {"step": 5})


@pytest.mark.parametrize("kind", KINDS)
def test_on_other_processes_nothing_happens(
    kind: type[Any], double: Callable[..., Calls], on_main: Callable[[bool], None]
) -> None:
    calls = double(kind.name)
    on_main(False)
    tracker = started(kind, calls)
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 1})
    tracker.finish()
    if kind in WITH_IMAGES:
        tracker.log_images({"samples": ["a"]})
    if kind is WandBTracker:
        tracker.log_table("results", data=[])
    assert calls == []
    assert tracker.tracker is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_not_started_cannot_be_logged_to(kind: type[RunTracker], double: Callable[..., Calls]) -> None:
    double(kind.name)
    with pytest.raises(InvalidArgument, match=f"{kind.__name__} has not been started"):
        kind("project").log({"loss": 1})


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_library_start_is_an_error(kind: type[RunTracker], not_installed: Callable[..., None]) -> None:
    not_installed(kind.name)
    with pytest.raises(MissingLibrary, match=kind.name):
        kind("project").start()


def test_wandb_writes_a_run_without_an_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_main: Callable[[bool], None]
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandBTracker("project", dir=str(tmp_path))
    tracker.start()
    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 0.5}, step=3)
    tracker.log_images({"samples": [np.zeros((2, 2, 3), np.uint8)]}, step=4)
    tracker.log_table("results", columns=["a"], data=[[1]], step=5)
    assert tracker.run.config["lr"] == 0.1
    assert dict(tracker.run.summary)["loss"] == 0.5
    tracker.finish()
    wandb.teardown()  # ends the service that writes the file
    (written,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    assert b"loss" in written.read_bytes()
