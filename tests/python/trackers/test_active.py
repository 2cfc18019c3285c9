"""The trackers of one ``Accelerator``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.plugins.enums import LoggerType
from accelerate_cpp.trackers.active import ActiveTrackers
from accelerate_cpp.trackers.general import AbsentTracker, GeneralTracker
from accelerate_cpp.trackers.registry import LOGGER_TYPE_TO_CLASS

pytestmark = pytest.mark.usefixtures("on_main")


class Mine(GeneralTracker):
    """Keeps what it is told; ``fails`` names the methods that raise."""

    requires_logging_directory = True

    def __init__(self, name: str = "mine", everywhere: bool = False, fails: tuple[str, ...] = ()) -> None:
        self.name, self.main_process_only, self.fails = name, not everywhere, fails
        super().__init__()
        self.told: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def _hear(self, method: str, *what: Any) -> None:
        self.told.append((method, *what))
        if method in self.fails:
            raise RuntimeError(f"{self.name} cannot {method}")

    def start(self) -> None:
        self._hear("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._hear("store", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._hear("log", values, step, kwargs)

    def finish(self) -> None:
        self._hear("finish")


class Created(Mine):
    """Is created by name."""

    def __init__(self, project: str, folder: str, **options: Any) -> None:
        super().__init__("created")
        self.arguments = (project, folder, options)


def started(*requested: Any, **arguments: Any) -> ActiveTrackers:
    trackers = ActiveTrackers(requested)
    trackers.start("logs", "project", **arguments)
    return trackers


def test_a_tracker_hears_of_everything_in_order() -> None:
    mine = Mine()
    trackers = ActiveTrackers([mine])
    assert (trackers.requested, trackers.active, mine.told) == ([mine], [], [])
    trackers.start("logs", "project", {"lr": 1})
    trackers.log({"loss": 2}, 3, {"mine": {"commit": False}, "wandb": {"unused": 1}})
    trackers.log({"loss": 3})
    trackers.finish()
    assert mine.told == [
        ("start",),
        ("store", {"lr": 1}),
        ("log", {"loss": 2}, 3, {"commit": False}),
        ("log", {"loss": 3}, None, {}),
        ("finish",),
    ]


def test_all_trackers_are_started_before_the_first_configuration_is_stored() -> None:
    order: list[tuple[Any, ...]] = []
    first, second = Mine("first"), Mine("second")
    first.told = second.told = order
    started(first, second, config={})
    assert [event[0] for event in order] == ["start", "start", "store", "store"]


def test_without_a_configuration_none_is_stored() -> None:
    mine = Mine()
    started(mine)
    assert mine.told == [("start",)]


@pytest.mark.parametrize("name", ["wandb", LoggerType.WANDB])
def test_trackers_by_name_are_created_with_project_folder_and_their_options(
    monkeypatch: pytest.MonkeyPatch, name: Any
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Created)
    trackers = started(name, init_kwargs={"wandb": {"group": "a"}, "mlflow": {"unused": 1}})
    (tracker,) = trackers.active
    assert isinstance(tracker, Created)
    assert tracker.arguments == ("project", "logs", {"group": "a"})


def test_trackers_that_are_running_are_not_started_again() -> None:
    mine = Mine()
    trackers = started(mine)
    with pytest.raises(InvalidArgument, match=r"running already.*end_training"):
        trackers.start("logs", "project")
    assert mine.told == [("start",)]
    trackers.finish()
    trackers.start("logs", "another")
    trackers.finish()
    assert [event[0] for event in mine.told] == ["start", "finish"] * 2


@pytest.mark.parametrize("method", ["start", "store", "log", "finish"])
def test_what_a_tracker_raises_is_raised(method: str) -> None:
    mine = Mine(fails=(method,))
    trackers = ActiveTrackers([mine])
    with pytest.raises(RuntimeError, match=f"mine cannot {method}"):
        trackers.start("logs", "project", {})
        trackers.log({})
        trackers.finish()


def test_a_start_that_failed_can_be_tried_again_and_what_started_is_finished() -> None:
    failing = Mine("failing", fails=("start",))
    trackers = ActiveTrackers([failing])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failing cannot start"):
            trackers.start("logs", "project")
    good = Mine("good")
    trackers = ActiveTrackers([good, failing])
    with pytest.raises(RuntimeError, match="failing cannot start"):
        trackers.start("logs", "project")
    with pytest.raises(InvalidArgument, match="running already"):
        trackers.start("logs", "project")
    before = len(failing.told)
    trackers.finish()
    assert good.told[-1] == ("finish",)
    assert len(failing.told) == before


def test_every_tracker_is_finished_once_also_if_others_fail() -> None:
    first, second = Mine("first", fails=("finish",)), Mine("second", fails=("finish",))
    third = Mine("third")
    trackers = started(first, second, third)
    with (
        pytest.warns(UserWarning, match="'second' could not be finished, either: .*second cannot finish"),
        pytest.raises(RuntimeError, match="first cannot finish"),
    ):
        trackers.finish()
    trackers.finish()
    assert [tracker.told.count(("finish",)) for tracker in (first, second, third)] == [1, 1, 1]


def test_a_tracker_is_found_by_name_itself_or_what_it_stands_for() -> None:
    mine, other = Mine(), Mine("other")
    trackers = started(mine, other)
    assert trackers.find("other") is other
    assert trackers.find("mine", unwrap=True) is mine.told
    trackers.finish()
    assert trackers.find("mine") is mine, "its address may be asked for after the end"


@pytest.mark.parametrize("is_main", [True, False])
def test_an_unknown_name_is_refused_on_every_process(on_main: Callable[[bool], None], is_main: bool) -> None:
    on_main(is_main)
    trackers = started(Mine(), Mine("other"))
    with pytest.raises(InvalidArgument, match=r"get_tracker\('nope'\).*expected mine, other"):
        trackers.find("nope")


def test_before_the_start_nothing_is_logged_aloud() -> None:
    trackers = ActiveTrackers([Mine()])
    with pytest.warns(UserWarning, match=r"get_tracker\('mine'\): nothing is logged.*init_trackers"):
        assert type(trackers.find("mine")) is GeneralTracker
    with pytest.warns(UserWarning, match="log: nothing is logged.*init_trackers"):
        trackers.log({"loss": 1})


@pytest.mark.filterwarnings("error")
def test_where_no_tracker_was_asked_for_everything_is_quiet() -> None:
    trackers = ActiveTrackers([])
    assert type(trackers.find("wandb", unwrap=True)) is GeneralTracker
    trackers.log({"loss": 1}, log_kwargs={"mine": {}})
    trackers.start("logs", "project", {"lr": 1}, {"mine": {}})
    assert type(trackers.find("wandb")) is GeneralTracker
    trackers.log({"loss": 1})
    trackers.finish()


@pytest.mark.filterwarnings("error")
def test_other_processes_have_trackers_only_if_these_say_so(
    on_main: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Created)
    on_main(False)
    mine, everywhere = Mine(), Mine("everywhere", everywhere=True)
    trackers = ActiveTrackers([mine, "wandb", everywhere])
    trackers.log({"loss": 1})
    assert isinstance(trackers.find("mine"), AbsentTracker)
    trackers.start("logs", "project", {"lr": 1}, {"typo": {}})
    trackers.log({"loss": 1}, 2)
    assert trackers.active == [everywhere]
    assert trackers.find("everywhere") is everywhere
    for name in ("mine", "wandb"):
        absent = trackers.find(name, unwrap=True)
        assert isinstance(absent, AbsentTracker)
        assert absent.name == name
    trackers.finish()
    assert mine.told == []
    assert [event[0] for event in everywhere.told] == ["start", "store", "log", "finish"]


@pytest.mark.parametrize("argument", ["init_kwargs", "log_kwargs"])
def test_options_for_a_name_that_no_tracker_has_are_pointed_out(argument: str) -> None:
    trackers = ActiveTrackers([Mine()])
    with warnings.catch_warnings(record=True) as quiet:
        warnings.simplefilter("always")
        trackers.start("logs", "project", init_kwargs={"mine": {}, "wandb": {}})
        trackers.log({}, log_kwargs={"mine": {}, "wandb": {}})
        trackers.finish()
    assert quiet == []
    uses: dict[str, Callable[[], None]] = {
        "init_kwargs": lambda: trackers.start("logs", "project", init_kwargs={"wanb": {}}),
        "log_kwargs": lambda: trackers.log({}, log_kwargs={"wanb": {}}),
    }
    with pytest.warns(UserWarning, match=rf"{argument} has options for 'wanb'.*trackers are mine"):
        uses[argument]()


def test_a_tracker_that_the_caller_adds_is_logged_to_and_finished() -> None:
    trackers, mine = started(), Mine()
    trackers.active.append(mine)
    trackers.log({"loss": 1})
    assert trackers.find("mine") is mine
    trackers.finish()
    assert [event[0] for event in mine.told] == ["log", "finish"]
