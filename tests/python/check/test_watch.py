"""Wrappers around methods; what all of them see together is tested by tests/distributed/test_check.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.check.watch import silence_trackers, wrap
from accelerate_cpp.trackers.active import ActiveTrackers
from accelerate_cpp.trackers.general import GeneralTracker


def test_a_wrapper_knows_whether_the_user_calls() -> None:
    callers: list[bool] = []

    def around(original: Any, is_the_users: bool, *args: Any) -> Any:
        callers.append(is_the_users)
        return original(*args)

    owner = SimpleNamespace(add=lambda a, b: a + b)
    wrap(owner, "add", around)
    assert owner.add(1, 2) == 3
    names = {"__name__": "torch.optim", "owner": owner}
    exec("result = owner.add(3, 4)", names)
    assert names["result"] == 7
    assert callers == [True, False]


class _Tracker(GeneralTracker):
    name, requires_logging_directory, tracker = "mine", False, None

    def start(self) -> None:
        raise AssertionError("a check has begun a run")


def test_trackers_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("start", "find"):
        monkeypatch.setattr(ActiveTrackers, name, getattr(ActiveTrackers, name))
    silence_trackers()
    trackers = ActiveTrackers([_Tracker()])
    trackers.start(None, "project", {"lr": 1})
    trackers.log({"loss": 1.0})
    trackers.find("mine").log_images({})
    trackers.find("mine", unwrap=True).anything.else_(1)
    trackers.finish()
    assert trackers.active == []
