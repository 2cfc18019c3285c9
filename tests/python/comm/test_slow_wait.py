"""The sentence about processes that take long to come."""

from __future__ import annotations

import pytest

from accelerate_cpp.comm import slow_wait
from accelerate_cpp.comm.slow_wait import SlowWait


@pytest.mark.parametrize(("threshold", "reports"), [("5", 1), ("100", 0), ("0", 0)])
def test_a_wait_is_told_of_once_when_it_is_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, threshold: str, reports: int
) -> None:
    monkeypatch.setenv("ACCELERATE_CPP_SLOW_WAIT_SECONDS", threshold)
    now = [1000.0]
    monkeypatch.setattr(slow_wait.time, "monotonic", lambda: now[0])
    wait = SlowWait(1, 3)
    wait.report("rank 2")
    now[0] += 7
    wait.report("rank 2")
    now[0] += 7
    wait.report("rank 2")
    assert wait.seconds == 14
    assert wait.sentence("rank 2") == "forming a group of 3 ranks: rank 1 waited 14 s for rank 2"
    assert caplog.messages == ["forming a group of 3 ranks: rank 1 waited 7 s for rank 2 until now"] * reports
