"""MLflow: what is stored is read back; and of a double, which environment and arguments reach it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.trackers.mlflow import EXPERIMENT, NESTED, RUN_ID, TAGS, MLflowTracker

Calls = list[tuple[Any, ...]]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch, on_main: Callable[[bool], None]) -> None:
    for variable in (EXPERIMENT, RUN_ID, TAGS, NESTED):
        monkeypatch.delenv(variable.name, raising=False)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module mlflow, which stores runs in ``tmp_path``."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # which mlflow exports
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    yield mlflow
    mlflow.end_run()
    mlflow.set_tracking_uri(None)


def test_a_run_is_read_back(store: Any, tmp_path: Path) -> None:
    tracker = MLflowTracker("experiment", tags='{"team": "mine"}', run_name="first", description="a try")
    tracker.start()
    tracker.store_init_configuration({f"p{number}": number for number in range(150)} | {"none": None})
    tracker.log({"loss": torch.tensor(0.5), "eval": {"f1": 0.25}}, step=3)
    tracker.log({"loss": 1.5}, step=4)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    tracker.log_artifact(str(tmp_path / "notes" / "a.txt"), "one")
    tracker.log_artifacts(str(tmp_path / "notes"), "all")
    figure = pytest.importorskip("matplotlib.figure").Figure()
    tracker.log_figure(figure, "plots/empty.png", dpi=10)
    run_id = tracker.tracker.info.run_id
    assert tracker.active_run is tracker.tracker
    tracker.finish()

    run, client = store.get_run(run_id), store.MlflowClient()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "first"
    assert store.get_experiment_by_name("experiment").experiment_id == run.info.experiment_id
    assert (run.data.tags["team"], run.data.tags["mlflow.note.content"]) == ("mine", "a try")
    assert (run.data.params["p149"], run.data.params["none"], len(run.data.params)) == ("149", "None", 151)
    history = client.get_metric_history(run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(3, 0.5), (4, 1.5)]
    assert run.data.metrics["eval/f1"] == 0.25
    folders = {
        folder: [file.path for file in client.list_artifacts(run_id, folder)] for folder in ("one", "all", "plots")
    }
    assert folders == {"one": ["one/a.txt"], "all": ["all/a.txt"], "plots": ["plots/empty.png"]}


def test_an_experiment_and_a_run_go_on(store: Any) -> None:
    first = started(experiment_name="experiment")
    first.log({"loss": 1.0}, step=1)
    first.finish()
    again = started(experiment_name="experiment", run_id=first.tracker.info.run_id)
    again.log({"loss": 0.5}, step=2)
    again.finish()
    history = store.MlflowClient().get_metric_history(first.tracker.info.run_id, "loss")
    assert [point.step for point in history] == [1, 2]


def test_a_run_may_be_inside_another(store: Any) -> None:
    outer = MLflowTracker("experiment")
    outer.start()
    inner = MLflowTracker("experiment", nested_run=True)
    inner.start()
    assert inner.tracker.data.tags["mlflow.parentRunId"] == outer.tracker.info.run_id
    inner.finish()
    outer.finish()


def test_without_a_name_the_experiment_is_mlflows_own_choice(store: Any) -> None:
    tracker = MLflowTracker()
    tracker.start()
    assert store.get_experiment(tracker.tracker.info.experiment_id).name == "Default"


def test_a_text_that_is_too_long_is_left_out_aloud(store: Any) -> None:
    from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

    tracker = MLflowTracker("experiment")
    tracker.start()
    with pytest.warns(UserWarning, match="leaves out the parameter 'long'"):
        tracker.store_init_configuration({"long": "x" * (MAX_PARAM_VAL_LENGTH + 1), "lr": 0.1})
    assert store.get_run(tracker.tracker.info.run_id).data.params == {"lr": "0.1"}


@pytest.fixture
def calls(double: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What mlflow is told; there is no experiment yet."""
    answers = {"mlflow.get_experiment_by_name()": None, "mlflow.create_experiment()": "88"}
    made = double("mlflow", answers=answers)
    limits = SimpleNamespace(MAX_PARAM_VAL_LENGTH=10, MAX_PARAMS_TAGS_PER_BATCH=2)
    for name in ("mlflow.utils", "mlflow.utils.validation"):
        monkeypatch.setitem(sys.modules, name, limits)
    return made


def started(**arguments: Any) -> MLflowTracker:
    made = MLflowTracker(**arguments)
    made.start()
    return made


PLAIN = {"run_id": None, "experiment_id": "88", "run_name": None, "nested": False, "tags": None, "description": None}


def test_a_new_experiment_has_tags_and_a_place_for_artifacts(calls: Calls, tmp_path: Path) -> None:
    started(experiment_name="e", logging_dir=tmp_path, tags={"a": "b"})
    assert calls[-2:] == [
        ("mlflow.create_experiment", {"name": "e", "artifact_location": str(tmp_path), "tags": {"a": "b"}}),
        ("mlflow.start_run", {**PLAIN, "tags": {"a": "b"}}),
    ]


def test_variables_win_over_arguments(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in ((EXPERIMENT, "theirs"), (RUN_ID, "7"), (TAGS, '{"c": "d"}'), (NESTED, "yes")):
        monkeypatch.setenv(variable.name, text)
    started(experiment_name="mine", run_id="8", tags={"a": "b"})
    assert ("mlflow.get_experiment_by_name", "theirs") in calls
    assert calls[-1] == ("mlflow.start_run", {**PLAIN, "run_id": "7", "nested": True, "tags": {"c": "d"}})


def test_a_variable_can_say_no_as_well(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NESTED.name, "false")
    started(experiment_name="mine", nested_run=True)
    assert calls[-1] == ("mlflow.start_run", PLAIN)


@pytest.mark.parametrize("text", ["[1]", "{", "1"])
def test_tags_that_are_no_json_object_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ValueError, match="JSON object"):
        MLflowTracker("mine", tags=text)
    monkeypatch.setenv(TAGS.name, text)
    with pytest.raises(InvalidArgument, match=r"MLFLOW_TAGS.*JSON object"):
        MLflowTracker("mine")


def test_parameters_go_in_batches_as_large_as_mlflow_takes(calls: Calls) -> None:
    tracker = started()
    calls.clear()
    tracker.store_init_configuration({"a": 1, "b": 2, "c": 3})
    assert calls == [("mlflow.log_params", {"a": 1, "b": 2}), ("mlflow.log_params", {"c": 3})]


def test_metrics_are_numbers_and_have_step_and_options(calls: Calls) -> None:
    tracker = started()
    calls.clear()
    with pytest.warns(UserWarning, match="mlflow leaves out 'note'"):
        tracker.log({"loss": 1, "note": "hello"}, step=3, synchronous=False)
    assert calls == [("mlflow.log_metrics", {"loss": 1}, {"step": 3, "synchronous": False})]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({}, {}),
        ({"dpi": 10}, {"save_kwargs": {"dpi": 10}}),
        ({"save_kwargs": {"dpi": 10}}, {"save_kwargs": {"dpi": 10}}),
    ],
)
def test_options_for_saving_a_figure_are_handed_on(calls: Calls, given: dict[str, Any], passed: dict[str, Any]) -> None:
    tracker = started()
    tracker.log_figure("a figure", "f.png", **given)
    assert calls[-1] == ("mlflow.log_figure", {"figure": "a figure", "artifact_file": "f.png", **passed})


def test_on_other_processes_nothing_happens(calls: Calls, on_main: Callable[[bool], None]) -> None:
    on_main(False)
    tracker = started()
    tracker.store_init_configuration({"lr": 1})
    tracker.log({"loss": 1})
    tracker.log_figure("a figure", "f.png")
    tracker.log_artifact("a")
    tracker.log_artifacts("b")
    tracker.finish()
    assert calls == []


@pytest.mark.parametrize(
    "use",
    [
        lambda tracker: tracker.log({"loss": 1}),
        lambda tracker: tracker.store_init_configuration({}),
        lambda tracker: tracker.log_figure("a figure", "f.png"),
        lambda tracker: tracker.log_artifact("a"),
        lambda tracker: tracker.log_artifacts("a"),
        lambda tracker: tracker.finish(),
    ],
)
def test_a_run_that_was_not_started_cannot_be_used(calls: Calls, use: Callable[[MLflowTracker], None]) -> None:
    with pytest.raises(InvalidArgument, match="not been started"):
        use(MLflowTracker("mine"))


def test_it_needs_the_library(not_installed: Callable[..., None]) -> None:
    not_installed("mlflow")
    with pytest.raises(MissingLibrary, match="pip install mlflow"):
        started()
