"""Aim, of which a double records what it is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from accelerate_cpp.errors import InvalidArgument, MissingLibrary
from accelerate_cpp.trackers.aim import AimTracker

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(double: Callable[..., Calls]) -> Calls:
    """What aim is told."""
    return double("aim")


@pytest.fixture
def tracker(calls: Calls) -> AimTracker:
    """One that has been started."""
    made = AimTracker("run", "logs")
    made.start()
    calls.clear()
    return made


def test_a_run_begins_in_the_repository_and_has_its_name(calls: Calls) -> None:
    made = AimTracker("run", "logs", experiment="mine")
    assert calls == []
    made.start()
    assert calls == [("aim.Run", {"repo": "logs", "experiment": "mine"}), ("aim.Run().name =", "run")]
    assert repr(made.tracker) == repr(made.writer) == "<aim.Run()>"


@pytest.mark.parametrize(("options", "repository"), [({}, "."), ({"repo": "there"}, "there")])
def test_the_repository_is_this_folder_or_what_is_asked_for(
    calls: Calls, options: dict[str, Any], repository: str
) -> None:
    AimTracker("run", **options).start()
    assert calls[0] == ("aim.Run", {"repo": repository})


def test_values_are_tracked_one_by_one_with_their_step(tracker: AimTracker, calls: Calls) -> None:
    image = object()
    tracker.log({"loss": np.float32(0.5), "eval": {"a": 1}, "image": image}, step=3, context={"subset": "train"})
    options = {"step": 3, "context": {"subset": "train"}}
    assert calls == [
        ("aim.Run().track", 0.5, {"name": "loss", **options}),
        ("aim.Run().track", 1, {"name": "eval/a", **options}),
        ("aim.Run().track", image, {"name": "image", **options}),
    ]


def test_a_text_becomes_a_text_of_aim(tracker: AimTracker, calls: Calls) -> None:
    tracker.log({"note": "hello"})
    assert calls[0] == ("aim.Text", "hello")
    assert (repr(calls[1][1]), calls[1][2]) == ("<aim.Text()>", {"name": "note", "step": None})


def test_none_is_left_out_aloud(tracker: AimTracker, calls: Calls) -> None:
    with pytest.warns(UserWarning, match="aim leaves out 'nothing'"):
        tracker.log({"nothing": None})
    assert calls == []


def test_images_may_have_captions_and_options(tracker: AimTracker, calls: Calls) -> None:
    options = {"aim_image": {"quality": 50}, "track": {"context": {}}}
    tracker.log_images({"plain": "pixels", "titled": ("pixels", "a cat")}, step=2, kwargs=options)
    made, tracked = calls[::2], calls[1::2]
    assert made == [
        ("aim.Image", "pixels", {"caption": "", "quality": 50}),
        ("aim.Image", "pixels", {"caption": "a cat", "quality": 50}),
    ]
    assert [call[2] for call in tracked] == [{"name": name, "step": 2, "context": {}} for name in ("plain", "titled")]
    tracker.log_images({"plain": "pixels"})
    assert calls[-1][2] == {"name": "plain", "step": None}


def test_hyperparameters_and_the_end(tracker: AimTracker, calls: Calls) -> None:
    tracker.store_init_configuration({"lr": 0.1})
    tracker.finish()
    assert calls == [("aim.Run()['hparams'] =", {"lr": 0.1}), ("aim.Run().close",)]


def test_on_other_processes_nothing_happens(calls: Calls, on_main: Callable[[bool], None]) -> None:
    on_main(False)
    made = AimTracker("run", "logs")
    made.start()
    made.store_init_configuration({"lr": 1})
    made.log({"loss": 1}, step=1)
    made.log_images({"image": "pixels"})
    made.finish()
    assert calls == []


def test_it_needs_the_library_and_a_start(not_installed: Callable[..., None]) -> None:
    with pytest.raises(InvalidArgument, match="not been started"):
        AimTracker("run").log({"loss": 1})
    not_installed("aim")
    with pytest.raises(MissingLibrary, match="pip install aim"):
        AimTracker("run").start()
