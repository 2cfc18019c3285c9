"""Environment variables for a while, and pinning a process by hand."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

import accelerate.utils.environment as original
import pytest

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.runtime import current
from accelerate_cpp.utils import environment, override_numa_affinity, set_numa_affinity


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """What pinning is asked for: local rank, number of workers, whether they use GPUs. It answers with two cores."""
    seen: list[tuple[int, int, bool]] = []

    def record(local_rank: int, workers: int, *, on_gpus: bool) -> list[int]:
        seen.append((local_rank, workers, on_gpus))
        return [4, 5]

    monkeypatch.setattr(environment, "pin_process", record)
    monkeypatch.setattr(current, "session", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    environment._pin_once.cache_clear()
    return seen


@pytest.mark.parametrize("name", environment.__all__)
def test_signatures_are_the_originals(name: str) -> None:
    def shape(module: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    assert shape(environment) == shape(original)


def test_the_same_call_pins_once_unless_it_overrides(calls: list[tuple[int, int, bool]]) -> None:
    for index in (1, 1, 2):
        set_numa_affinity(index)
    assert calls == [(1, 3, True), (2, 3, True)]
    override_numa_affinity(2)
    override_numa_affinity(2)
    assert calls[2:] == [(2, 3, True)] * 2


def test_a_fork_is_pinned_for_itself(calls: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    set_numa_affinity(1)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    set_numa_affinity(1)
    assert len(calls) == 2


def test_the_environment_tells_how_many_processes_there_are_and_whether_they_use_gpus(
    calls: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    override_numa_affinity(0)
    assert calls == [(0, 1, False)]


@pytest.mark.parametrize(("verbose", "debug", "logs"), [(None, "", 0), (None, "1", 1), (True, "", 1), (False, "1", 0)])
def test_cores_are_logged_when_asked_or_in_debug_mode(
    calls: list[tuple[int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    verbose: bool | None,
    debug: str,
    logs: int,
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", debug)
    with caplog.at_level(logging.INFO):
        override_numa_affinity(2, verbose)
    assert [record.getMessage() for record in caplog.records] == [
        "CPU affinity: local process 2 is pinned to cores 4-5"
    ] * logs


def test_an_index_that_is_no_process_of_this_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "session", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InvalidArgument, match="expected 0 to 1"):
        override_numa_affinity(2)


def test_patched_variables_are_texts_in_upper_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTER", "before")
    with environment.patch_environment(outer=1, inner=True):
        assert (os.environ["OUTER"], os.environ["INNER"]) == ("1", "True")
        with environment.clear_environment():
            assert dict(os.environ) == {}
    assert os.environ["OUTER"] == "before"
    assert "INNER" not in os.environ


def test_a_function_can_run_with_patched_variables() -> None:
    @environment.patch_environment(some_variable="x")
    def read() -> str | None:
        return os.environ.get("SOME_VARIABLE")

    assert (read(), read(), os.environ.get("SOME_VARIABLE")) == ("x", "x", None)


@pytest.mark.parametrize("text", ["yes", "True", "ON", "1", "no", "F", "off", "0", "maybe", ""])
def test_texts_mean_what_they_mean_in_the_original(text: str) -> None:
    try:
        expected = original.str_to_bool(text)
    except ValueError:
        with pytest.raises(ValueError, match="expected one of"):
            environment.str_to_bool(text)
    else:
        assert environment.str_to_bool(text) == expected
        with environment.patch_environment(some_flag=text):
            assert environment.parse_flag_from_env("SOME_FLAG") is bool(expected)


def test_what_is_not_set_has_a_default() -> None:
    with environment.clear_environment():
        assert environment.parse_flag_from_env("SOME_FLAG", default=True) is True
        assert environment.parse_choice_from_env("SOME_CHOICE") == "no"
        assert environment.get_int_from_env(["FIRST", "SECOND"], 9) == 9
        with environment.patch_environment(first=-1, second=3, some_choice="eager"):
            assert environment.get_int_from_env(["FIRST", "SECOND"], 9) == 3
            assert environment.parse_choice_from_env("SOME_CHOICE") == "eager"
