"""Logging that knows the ranks, in one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from accelerate_cpp.logging import MultiProcessAdapter, get_logger
from accelerate_cpp.state import AcceleratorState, PartialState


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    level = logging.getLogger().level
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    logging.getLogger().setLevel(level)


def test_logging_before_any_state_says_what_to_create() -> None:
    with pytest.raises(RuntimeError, match=r"create PartialState\(\) or Accelerator\(\)"):
        get_logger("tests.logging.early").warning("x")


def test_messages_carry_the_rank_and_the_line_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    logger = get_logger("tests.logging.rank", log_level="info")
    assert isinstance(logger, MultiProcessAdapter)
    logger.info("%s there", "hello")
    logger.warning("everyone", main_process_only=False)
    logger.warning("in turn", in_order=True)
    logger.warning_once("once")
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] hello there",
        "[RANK 0] everyone",
        "[RANK 0] in turn",
        "[RANK 0] once",
    ]
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


def test_a_message_below_the_level_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    get_logger("tests.logging.level", log_level="ERROR").warning("x")
    assert caplog.records == []


def test_a_warning_is_logged_once_for_the_same_arguments(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    logger = get_logger("tests.logging.once")
    logger.warning_once("a")
    logger.warning_once("a")
    logger.warning_once("b")
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] a", "[RANK 0] b"]


def test_the_level_comes_from_the_argument_or_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    assert get_logger("tests.logging.variable").logger.level == logging.DEBUG
    assert get_logger("tests.logging.argument", log_level="ERROR").logger.level == logging.ERROR
    assert logging.getLogger().level == logging.ERROR


def test_without_either_the_level_is_left_alone() -> None:
    assert get_logger("tests.logging.untouched").logger.level == logging.NOTSET
