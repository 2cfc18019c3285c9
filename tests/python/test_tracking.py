"""Experiment trackers as scripts use them: the names of the module, and those of ``Accelerator``."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate.tracking as original
import pytest
import torch

from accelerate_cpp import Accelerator, tracking
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime import current
from accelerate_cpp.tracking import (
    LOGGER_TYPE_TO_CLASS,
    GeneralTracker,
    filter_trackers,
    get_available_trackers,
    on_main_process,
    register_tracker_class,
)
from accelerate_cpp.utils import LoggerType, ProjectConfiguration

pytestmark = pytest.mark.usefixtures("fresh_state")

CLASSES = [
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
]


class Mine(GeneralTracker):
    """A custom tracker, as the documentation of the original shows them."""

    name = "mine"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, project: str = "", **options: Any) -> None:
        super().__init__()
        self.told: list[Any] = [(project, options)]

    @property
    def tracker(self) -> list[Any]:
        return self.told

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.told.append((values, step, kwargs))


@pytest.fixture(autouse=True)
def _names_stay_as_they_were() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


def shape(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters, as the original's functions and methods have them."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", CLASSES)
def test_classes_have_the_originals_methods_and_signatures(name: str) -> None:
    ours, theirs = getattr(tracking, name), getattr(original, name)
    assert issubclass(ours, GeneralTracker)
    assert shape(ours) == shape(theirs)
    public = [method for method in dir(theirs) if not method.startswith("_") and callable(getattr(theirs, method))]
    assert {"start", "store_init_configuration", "log", "finish"} <= set(public)
    for method in public:
        assert shape(getattr(ours, method)) == shape(getattr(theirs, method)), method
    for attribute in ("name", "requires_logging_directory"):
        assert getattr(ours, attribute, None) == getattr(theirs, attribute, None)


def test_the_classes_have_the_originals_names() -> None:
    assert {name: kind.__name__ for name, kind in LOGGER_TYPE_TO_CLASS.items()} == {
        name: kind.__name__ for name, kind in original.LOGGER_TYPE_TO_CLASS.items()
    }


@pytest.mark.parametrize(
    "name", ["filter_trackers", "get_available_trackers", "on_main_process", "register_tracker_class"]
)
def test_functions_have_the_originals_signatures(name: str) -> None:
    assert shape(getattr(tracking, name)) == shape(getattr(original, name))


def test_every_listed_name_exists_and_none_loads_a_library() -> None:
    libraries = ("tensorboard", "mlflow", "wandb", "aim", "comet_ml", "clearml", "dvclive", "swanlab", "trackio")
    script = (
        "import sys; from accelerate_cpp.tracking import *; from accelerate_cpp import Accelerator; Accelerator; "
        f"print([name for name in {libraries} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
    assert set(CLASSES) < set(tracking.__all__)


def test_available_trackers_are_members_of_the_enum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "installed", lambda: ["wandb", "comet_ml"])
    assert get_available_trackers() == [LoggerType.WANDB, LoggerType.COMETML]


def test_chosen_trackers_are_members_names_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Mine)
    register_tracker_class(Mine)
    mine = Mine()
    assert filter_trackers([mine, "mlflow", "mine"]) == [mine, LoggerType.MLFLOW, "mine"]
    assert filter_trackers(None, "logs") == []


def test_a_run_with_a_tracker_of_ones_own() -> None:
    mine = Mine()
    accelerator = Accelerator(cpu=True, log_with=mine)
    assert (accelerator.log_with, accelerator.trackers) == ([mine], [])
    accelerator.init_trackers("project", config={"lr": 1})
    assert accelerator.trackers == [mine]
    assert accelerator.get_tracker("mine") is mine
    assert accelerator.get_tracker("mine", unwrap=True) is mine.told
    accelerator.log({"loss": 2}, step=3, log_kwargs={"mine": {"commit": False}})
    accelerator.end_training()
    assert mine.told == [("", {}), {"lr": 1}, ({"loss": 2}, 3, {"commit": False})]


def test_a_registered_tracker_is_created_by_name() -> None:
    register_tracker_class(Mine)
    accelerator = Accelerator(cpu=True, log_with=["mine"])
    accelerator.init_trackers("project", None, {"mine": {"group": "a"}})
    accelerator.log({"loss": 1}, 2)
    assert accelerator.get_tracker("mine", unwrap=True) == [("project", {"group": "a"}), ({"loss": 1}, 2, {})]


def test_an_unknown_tracker_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidArgument, match="'nonsense' is not a tracker"):
        Accelerator(cpu=True, log_with="nonsense")
    assert current.session is None


def test_what_is_not_installed_is_left_out_with_a_warning_at_the_line_of_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="log_with: nothing is logged with wandb") as caught:
        accelerator = Accelerator(cpu=True, log_with="wandb")
    assert accelerator.log_with == []
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ({"project_dir": "p"}, "p"),
        ({"project_config": ProjectConfiguration(project_dir="p", logging_dir="l")}, "l"),
        ({"project_config": ProjectConfiguration(total_limit=3), "project_dir": "p"}, "p"),
        ({"project_config": ProjectConfiguration(logging_dir="l"), "project_dir": "p"}, "l"),
    ],
)
def test_trackers_write_into_the_folder_for_logs(arguments: dict[str, Any], folder: str) -> None:
    class InFolder(Mine):
        name, requires_logging_directory = "in_folder", True

        def __init__(self, project: str, place: str) -> None:
            super().__init__()
            self.place = place

    register_tracker_class(InFolder)
    with pytest.raises(ValueError, match="Logging with `in_folder` requires a `logging_dir`"):
        Accelerator(cpu=True, log_with="in_folder", project_config=ProjectConfiguration(total_limit=3))
    accelerator = Accelerator(cpu=True, log_with="in_folder", **arguments)
    accelerator.init_trackers("project")
    assert accelerator.logging_dir == accelerator.get_tracker("in_folder").place == folder


@pytest.mark.parametrize(
    "use",
    [
        lambda accelerator: accelerator.log({"loss": 1}),
        lambda accelerator: accelerator.get_tracker("mine"),
        lambda accelerator: accelerator.init_trackers("project", init_kwargs={"mein": {}}),
    ],
)
def test_warnings_point_at_the_line_of_the_script(use: Callable[[Accelerator], Any]) -> None:
    accelerator = Accelerator(cpu=True, log_with=Mine())
    with pytest.warns(UserWarning, match="nothing is logged|no tracker has that name") as caught:
        use(accelerator)
    assert [warning.filename for warning in caught] == [__file__]


def test_the_list_of_trackers_may_be_replaced() -> None:
    accelerator, mine = Accelerator(cpu=True), Mine()
    accelerator.trackers = [mine]
    accelerator.log({"loss": 1})
    assert mine.told[1:] == [({"loss": 1}, None, {})]


def test_trackers_end_although_a_checkpoint_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(Mine, "finish", lambda self: ended.append(self.name))
    accelerator = Accelerator(cpu=True, log_with=Mine())
    accelerator.init_trackers("project")

    def fail() -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(accelerator._checkpoints, "wait", fail)
    with pytest.raises(OSError, match="the disk is full"):
        accelerator.end_training()
    assert ended == ["mine"]


def test_the_end_of_training_ends_trackers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(Mine, "finish", lambda self: ended.append(self.name))
    accelerator = Accelerator(cpu=True, log_with=Mine())
    accelerator.init_trackers("project")
    accelerator.end_training()
    accelerator.end_training()
    assert ended == ["mine"]


def test_tensorboard_through_the_accelerator(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accelerator = Accelerator(cpu=True, log_with=LoggerType.TENSORBOARD, project_dir=tmp_path)
    assert accelerator.log_with == [LoggerType.TENSORBOARD]
    accelerator.init_trackers("run", {"lr": 0.1}, init_kwargs={"tensorboard": {"flush_secs": 1}})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3)
    with pytest.warns(UserWarning, match="tensorboard leaves out 'curve'") as caught:
        accelerator.log({"curve": torch.zeros(3)}, step=3)
    assert caught[0].filename == __file__
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("mine", 2.0, 4)
    accelerator.end_training()
    events = accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in ("loss", "mine")}
    assert found == {"loss": [(3, 0.5)], "mine": [(4, 2.0)]}
