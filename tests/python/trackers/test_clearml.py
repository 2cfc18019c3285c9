"""ClearML, of which a double records what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.trackers.clearml import PROJECT, TASK, ClearMLTracker

Calls = list[tuple[Any, ...]]
LOGGER = "clearml.Task.init().get_logger()"


@pytest.fixture
def calls(double: Callable[..., Calls], monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What clearml is told; the script has no task of its own."""
    for variable in (PROJECT, TASK):
        monkeypatch.delenv(variable.name, raising=False)
    return double("clearml", answers={"clearml.Task.current_task()": None})


@pytest.fixture
def tracker(calls: Calls) -> ClearMLTracker:
    """One that has been started."""
    made = ClearMLTracker("run")
    made.start()
    calls.clear()
    return made


def reports(calls: Calls) -> Calls:
    """The calls of reports, by name and keyword arguments."""
    return [(call[0].removeprefix(f"{LOGGER}."), call[1]) for call in calls if call[0].startswith(f"{LOGGER}.")]


@pytest.mark.parametrize(
    ("variables", "options", "names"),
    [
        ({}, {}, ("run", "run")),
        ({"CLEARML_PROJECT": "p", "CLEARML_TASK": "t"}, {}, ("p", "t")),
        ({"CLEARML_TASK": "t"}, {}, ("run", "t")),
        ({"CLEARML_TASK": "t"}, {"task_name": "mine"}, ("run", "mine")),
    ],
)
def test_project_and_task_have_the_name_of_the_run_or_of_the_variables_or_of_the_options(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    options: dict[str, str],
    names: tuple[str, str],
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    made = ClearMLTracker("run", tags=["a"], **options)
    assert calls == []
    made.start()
    assert calls[-1] == ("clearml.Task.init", {"project_name": names[0], "task_name": names[1], "tags": ["a"]})
    assert repr(made.tracker) == repr(made.task) == "<clearml.Task.init()>"


def test_a_task_of_the_script_is_used_and_left_open(double: Callable[..., Calls]) -> None:
    calls = double("clearml")
    made = ClearMLTracker("run")
    made.start()
    made.finish()
    assert calls == [("clearml.Task.current_task",)]
    assert repr(made.tracker) == "<clearml.Task.current_task()>"


def test_a_task_of_its_own_is_closed(tracker: ClearMLTracker, calls: Calls) -> None:
    tracker.finish()
    assert calls == [("clearml.Task.init().close",)]


def test_the_configuration_is_connected_and_what_clearml_makes_of_it_returned(
    tracker: ClearMLTracker, calls: Calls
) -> None:
    connected = tracker.store_init_configuration({"lr": 0.1})
    assert calls == [("clearml.Task.init().connect_configuration", {"lr": 0.1})]
    assert repr(connected) == "<clearml.Task.init().connect_configuration()>"


def test_prefixes_become_series(tracker: ClearMLTracker, calls: Calls) -> None:
    tracker.log({"eval_loss": 1, "test_f1": 2, "train_lr": 3, "loss": 4, "d": {"x": 5}, "eval": 6}, step=2)
    expected = [
        ("loss", "eval", 1),
        ("f1", "test", 2),
        ("lr", "train", 3),
        ("loss", "train", 4),
        ("d/x", "train", 5),
        ("eval", "train", 6),
    ]
    assert reports(calls) == [
        ("report_scalar", {"title": title, "series": series, "value": value, "iteration": 2})
        for title, series, value in expected
    ]


def test_without_a_step_values_are_single_ones_under_their_full_names(tracker: ClearMLTracker, calls: Calls) -> None:
    tracker.log({"eval_loss": torch.tensor(0.5)})
    assert reports(calls) == [("report_single_value", {"name": "eval_loss", "value": 0.5})]


def test_what_is_no_number_is_left_out_aloud(tracker: ClearMLTracker, calls: Calls) -> None:
    with pytest.warns(UserWarning, match="clearml leaves out 'note'"):
        tracker.log({"note": "hello"}, step=1)
    assert reports(calls) == []


def test_each_image_of_a_list_has_a_series_of_its_own(tracker: ClearMLTracker, calls: Calls) -> None:
    tracker.log_images({"eval_samples": ["a", "b"], "one": "c"}, step=4, max_image_history=1)
    assert reports(calls) == [
        ("report_image", {"title": title, "series": series, "iteration": 4, "image": image, "max_image_history": 1})
        for title, series, image in [("samples", "eval", "a"), ("samples", "eval_1", "b"), ("one", "train", "c")]
    ]


@pytest.mark.parametrize(
    ("given", "table"),
    [
        ({"columns": ["a"], "data": [[1]]}, [["a"], [1]]),
        ({"data": [["a"], [1]]}, [["a"], [1]]),
        ({"dataframe": "a frame", "columns": ["unused"]}, "a frame"),
    ],
)
def test_a_table_is_rows_below_their_columns_or_a_frame(
    tracker: ClearMLTracker, calls: Calls, given: dict[str, Any], table: Any
) -> None:
    tracker.log_table("eval_results", step=5, **given)
    assert reports(calls) == [
        ("report_table", {"title": "results", "series": "eval", "table_plot": table, "iteration": 5})
    ]


def test_a_table_of_nothing_is_refused(tracker: ClearMLTracker) -> None:
    with pytest.raises(InvalidArgument, match=r"log_table\('results'\).*neither data nor dataframe"):
        tracker.log_table("results", columns=["a"])


def test_on_other_processes_nothing_happens(calls: Calls, on_main: Callable[[bool], None]) -> None:
    on_main(False)
    made = ClearMLTracker("run")
    made.start()
    made.store_init_configuration({"lr": 1})
    made.log({"loss": 1}, step=1)
    made.log_images({"image": "pixels"})
    made.log_table("results", data=[])
    made.finish()
    assert calls == []


def test_it_needs_the_library_and_a_start(not_installed: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match="not been started"):
        ClearMLTracker("run").log({"loss": 1})
    not_installed("clearml")
    with pytest.raises(MissingLibrary, match="pip install clearml"):
        ClearMLTracker("run").start()
