"""The base class of trackers, and what stands for a tracker where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.trackers.general import (
    AbsentTracker,
    GeneralTracker,
    LibraryTracker,
    options_of,
    require_attributes,
)

ALL = {"name": "mine", "requires_logging_directory": False, "tracker": None}


@pytest.mark.parametrize("present", [(), ("name",), ("name", "tracker"), ("requires_logging_directory",)])
def test_one_error_names_all_attributes_that_are_missing(present: tuple[str, ...]) -> None:
    kind = type("Mine", (GeneralTracker,), {name: ALL[name] for name in present})
    with pytest.raises(NotImplementedError, match="Mine") as caught:
        kind()
    assert [f"`{name}`" in str(caught.value) for name in ALL] == [name not in present for name in ALL]


def test_a_tracker_that_did_not_call_the_base_class_is_judged_as_well() -> None:
    kind = type("Mine", (GeneralTracker,), {"__init__": lambda self: None})
    with pytest.raises(NotImplementedError, match="`tracker`"):
        require_attributes(kind())


def test_attributes_may_be_properties_that_do_not_work_yet_and_those_of_the_object() -> None:
    class Mine(GeneralTracker):
        requires_logging_directory = True

        def __init__(self) -> None:
            self.name = "mine"
            super().__init__()
            self.run = "a run"

        @property
        def tracker(self) -> str:
            return self.run

    assert Mine().tracker == "a run"


def test_only_the_main_process_logs_unless_a_tracker_says_otherwise() -> None:
    assert GeneralTracker.main_process_only is True


def test_a_blank_tracker_needs_nothing_and_does_nothing() -> None:
    blank = GeneralTracker(_blank=True)
    assert [
        blank.start(),
        blank.store_init_configuration({"lr": 1}),
        blank.log({"loss": 1}, 2, commit=False),
        blank.log({}, step=None),
        blank.finish(),
    ] == [None] * 5
    assert not hasattr(blank, "tracker")


class Library(LibraryTracker):
    """A tracker of a library."""

    name, requires_logging_directory, run = "library", False, None

    @property
    def tracker(self) -> Any:
        return self.run


def test_a_tracker_that_was_not_started_says_so_when_it_is_used() -> None:
    made = Library()
    with pytest.raises(InvalidArgument, match=r"Library has not been started.*init_trackers"):
        made._opened()
    made.run = "a run"
    assert made._opened() == "a run"


def test_a_tracker_of_a_library_has_to_say_what_it_stands_for() -> None:
    kind = type("Forgot", (LibraryTracker,), {"name": "forgot", "requires_logging_directory": False})
    with pytest.raises(NotImplementedError, match="Forgot"):
        kind().tracker  # noqa: B018


def test_of_an_absent_tracker_anything_can_be_used_without_effect() -> None:
    absent = AbsentTracker("wandb")
    assert isinstance(absent, GeneralTracker)
    assert (absent.name, absent.requires_logging_directory) == ("wandb", False)
    assert absent.log({"loss": 1}, step=3) is None
    for used in (
        absent.tracker,
        absent.log_images({"image": []}, step=1),
        absent.run.config.update({}, allow_val_change=True),
        absent["hparams"],
        absent("called"),
    ):
        assert used is absent
    absent["hparams"] = {"lr": 1}
    absent.summary["best"] = 1
    absent.step = 3
    assert list(absent.history) == []
    with absent.start_run() as run:
        assert run is absent


def test_an_absent_tracker_has_no_special_methods_that_it_does_not_define() -> None:
    assert not hasattr(AbsentTracker("wandb"), "__len__")
    assert not hasattr(AbsentTracker("wandb"), "__array__")


@pytest.mark.parametrize(
    ("options", "expected"), [(None, {}), ({}, {}), ({"other": {"a": 1}}, {}), ({"mine": {"a": 1}}, {"a": 1})]
)
def test_options_are_those_of_the_name(options: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert options_of("mine", options) == expected
