"""Which trackers ``log_with`` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.enums import LoggerType
from accelerate_cpp.trackers import libraries
from accelerate_cpp.trackers.general import GeneralTracker
from accelerate_cpp.trackers.registry import (
    LOGGER_TYPE_TO_CLASS,
    choose,
    create,
    installed,
    register_tracker_class,
)


class Mine(GeneralTracker):
    """A custom tracker that keeps its arguments."""

    name: str = "mine"
    requires_logging_directory: bool = False
    tracker = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self.given = (args, options)


class InFolder(Mine):
    """A custom tracker that needs a folder."""

    name = "in_folder"
    requires_logging_directory = True


@pytest.fixture(autouse=True)
def _names_stay_as_they_were() -> Iterator[None]:
    before = dict(LOGGER_TYPE_TO_CLASS)
    yield
    LOGGER_TYPE_TO_CLASS.clear()
    LOGGER_TYPE_TO_CLASS.update(before)


@pytest.fixture
def have(double: Callable[..., object], not_installed: Callable[..., None]) -> Callable[..., None]:
    """Call it with the names of the trackers whose libraries are to be installed."""

    def install(*names: str) -> None:
        for name, modules in libraries.MODULES.items():
            not_installed(*modules)
            if name in names:
                double(modules[0])

    return install


def test_every_built_in_tracker_has_a_class_of_its_name_and_a_library() -> None:
    assert {name: kind.name for name, kind in LOGGER_TYPE_TO_CLASS.items()} == {
        name: name for name in libraries.MODULES
    }


@pytest.mark.parametrize("nothing", [None, [], ()])
def test_nothing_is_nothing(nothing: Any) -> None:
    assert choose(nothing, None) == []


@pytest.mark.parametrize(
    "asked", ["wandb", LoggerType.WANDB, ["wandb"], ("wandb",), ["wandb", LoggerType.WANDB, "wandb"]]
)
def test_a_tracker_is_asked_for_by_name_or_by_member_and_counts_once(have: Callable[..., None], asked: Any) -> None:
    have("wandb")
    assert choose(asked, None) == ["wandb"]


def test_the_order_is_kept_and_objects_count_once(have: Callable[..., None]) -> None:
    have("wandb", "mlflow")
    first, second = Mine(), Mine()
    assert choose(["wandb", first, "mlflow", first, second], None) == ["wandb", first, "mlflow", second]


def test_a_single_object_needs_no_list() -> None:
    tracker = Mine()
    assert choose(tracker, None) == [tracker]


@pytest.mark.parametrize("every", ["all", LoggerType.ALL])
def test_all_is_what_is_installed_after_the_objects(have: Callable[..., None], every: Any) -> None:
    have("tensorboard", "mlflow", "aim")
    register_tracker_class(InFolder)
    tracker = Mine()
    assert choose([every, "mlflow", tracker, "in_folder"], "logs") == [
        tracker,
        "tensorboard",
        "aim",
        "mlflow",
        "in_folder",
    ]
    assert installed() == ["tensorboard", "aim", "mlflow"]


def test_what_is_not_installed_is_left_out_aloud(have: Callable[..., None]) -> None:
    have("wandb")
    with pytest.warns(UserWarning, match="log_with: nothing is logged with comet_ml.*pip install comet-ml"):
        assert choose(["comet_ml", "wandb"], None) == ["wandb"]


@pytest.mark.filterwarnings("error")
def test_other_processes_are_quiet_about_it(have: Callable[..., None], on_main: Callable[[bool], None]) -> None:
    have()
    on_main(False)
    assert choose("aim", None) == []


@pytest.mark.parametrize("name", ["tensorboard", "aim", "all"])
def test_trackers_that_write_files_need_a_folder(have: Callable[..., None], name: str) -> None:
    have("tensorboard", "aim")
    with pytest.raises(InvalidArgument, match=r"requires a `logging_dir`.*project_dir"):
        choose(name, None)
    assert name in (*choose(name, "logs"), "all")


@pytest.mark.parametrize("wrong", ["nonsense", "WANDB", "", 3, {"wandb"}, LoggerType, ["mlflow", "nonsense"]])
def test_unknown_names_are_refused_with_those_that_exist(have: Callable[..., None], wrong: Any) -> None:
    have("mlflow")
    with pytest.raises(InvalidArgument, match=r"log_with: .* is not a tracker; expected one of all, .*wandb"):
        choose(wrong, "logs")


def test_a_class_is_refused_with_what_to_do() -> None:
    with pytest.raises(InvalidArgument, match="pass an instance of it, or register it with register_tracker_class"):
        choose(Mine, None)


def test_an_object_that_is_no_complete_tracker_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="`tracker`"):
        choose(GeneralTracker(_blank=True), None)


def test_a_registered_class_is_known_by_its_name() -> None:
    register_tracker_class(Mine)
    assert choose(["mine"], None) == ["mine"]
    assert LOGGER_TYPE_TO_CLASS["mine"] is Mine


@pytest.mark.filterwarnings("error")
def test_registering_a_class_again_is_no_news() -> None:
    register_tracker_class(Mine)
    register_tracker_class(Mine)
    assert LOGGER_TYPE_TO_CLASS["mine"] is Mine


def test_a_class_may_take_a_name_that_exists_and_needs_no_library_then(have: Callable[..., None]) -> None:
    have()
    ours = type("Ours", (Mine,), {"name": "wandb"})
    with pytest.warns(UserWarning, match="'wandb' meant WandBTracker, and means Ours"):
        register_tracker_class(ours)
    assert choose("wandb", None) == ["wandb"]
    assert type(create("wandb", "project", None, {})) is ours


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (int, "expected a subclass of GeneralTracker"),
        (Mine(), "expected a subclass of GeneralTracker"),
        (GeneralTracker, "its name is None"),
        (type("Empty", (Mine,), {"name": ""}), "its name is ''"),
        (type("Every", (Mine,), {"name": "all"}), "its name is 'all'"),
        (type("Late", (Mine,), {"name": property(lambda self: "late")}), "its name is <property"),
        (type("NoFolder", (GeneralTracker,), {"name": "no_folder"}), "requires_logging_directory"),
    ],
)
def test_classes_that_cannot_be_created_by_name_are_refused(wrong: Any, message: str) -> None:
    before = dict(LOGGER_TYPE_TO_CLASS)
    with pytest.raises(InvalidArgument, match=message):
        register_tracker_class(wrong)
    assert before == LOGGER_TYPE_TO_CLASS


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Mine, (("project",), {"group": "a"})), (InFolder, (("project", "logs"), {"group": "a"}))],
)
def test_a_tracker_is_created_with_the_folder_if_it_needs_one(
    kind: type[Mine], expected: tuple[tuple[str, ...], dict[str, str]]
) -> None:
    register_tracker_class(kind)
    tracker = create(kind.name, "project", "logs", {"group": "a"})
    assert isinstance(tracker, kind)
    assert tracker.given == expected
