"""The table of environment variables."""

from __future__ import annotations

import os

import pytest

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import InvalidArgument


def test_every_variable_stands_in_the_table_once() -> None:
    names = [variable.name for variable in env_table.VARIABLES]
    assert len(names) == len(set(names))
    assert {"RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_CPP_RENDEZVOUS_FD"} <= set(names)


@pytest.mark.parametrize("environ", [{}, {"RANK": ""}])
def test_an_unset_or_empty_variable_gives_its_default(environ: dict[str, str]) -> None:
    assert env_table.RANK.get(environ) is None
    assert not env_table.RANK.is_set(environ)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("Yes", True), ("ON", True), ("t", True), ("0", False), ("off", False), ("n", False)],
)
def test_flags_take_the_usual_words(text: str, value: bool) -> None:
    assert env_table.USE_CPU.get({"ACCELERATE_USE_CPU": text}) is value


@pytest.mark.parametrize("environ", [{"RANK": "one"}, {"RANK": "1.0"}])
def test_a_text_that_does_not_parse_is_refused_with_name_text_and_meaning(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=rf"RANK='{environ['RANK']}'.*integer.*rank of this process"):
        env_table.RANK.get(environ)


@pytest.mark.parametrize(("text", "seconds"), [("", 30.0), ("0", 0.0), ("2.5", 2.5), ("1e3", 1000.0)])
def test_a_slow_wait_is_a_number_of_seconds(text: str, seconds: float) -> None:
    environ = {"ACCELERATE_CPP_SLOW_WAIT_SECONDS": text}
    assert env_table.SLOW_WAIT_SECONDS.get(environ) == seconds
    assert env_table.SLOW_WAIT_SECONDS.get(env_table.render({env_table.SLOW_WAIT_SECONDS: seconds})) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_slow_wait_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"expected a number of seconds, 0 or more.*0 means never"):
        env_table.SLOW_WAIT_SECONDS.get({"ACCELERATE_CPP_SLOW_WAIT_SECONDS": text})


@pytest.mark.parametrize(
    ("text", "cores"), [("", ()), ("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), (" 9,2-3\n", (2, 3, 9)), ("1,1-2", (1, 2))]
)
def test_cores_are_numbers_and_ranges(text: str, cores: tuple[int, ...]) -> None:
    assert env_table.parse_cores(text) == cores
    assert env_table.parse_cores(env_table.render_cores(cores)) == cores


def test_cores_in_a_row_are_rendered_as_a_range() -> None:
    assert env_table.render_cores((8, 0, 1, 2, 4, 5, 4)) == "0-2,4-5,8"


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "0-3:2", "1.5"])
def test_cores_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"ACCELERATE_CPP_CORES=.*such as 0-3,8"):
        env_table.CORES.get({"ACCELERATE_CPP_CORES": text})


def test_a_rendered_environment_reads_back_and_leaves_none_out() -> None:
    values = {env_table.RANK: 1, env_table.USE_CPU: True, env_table.MASTER_ADDR: None}
    environ = env_table.render(values)
    assert environ == {"RANK": "1", "ACCELERATE_USE_CPU": "True"}
    assert (env_table.RANK.get(environ), env_table.USE_CPU.get(environ)) == (1, True)


def test_the_environment_of_the_process_is_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert env_table.WORLD_SIZE.get() == 3
    monkeypatch.delenv("WORLD_SIZE")
    assert env_table.WORLD_SIZE.get() is None


def test_variables_are_replaced_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("ADDED", raising=False)
    with pytest.raises(KeyError), env_table.replaced_environment({"KEPT": "within", "ADDED": "1"}):
        assert (env_table.raw("KEPT"), env_table.raw("ADDED")) == ("within", "1")
        raise KeyError
    assert (env_table.raw("KEPT"), env_table.raw("ADDED")) == ("before", None)


def test_all_variables_are_gone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "before")
    before = dict(os.environ)
    with env_table.replaced_environment({"ONLY": "1"}, clear=True):
        assert dict(os.environ) == {"ONLY": "1"}
        os.environ["MORE"] = "1"
    assert dict(os.environ) == before


def test_slot_on_the_board_is_a_descriptor_and_a_number() -> None:
    assert env_table.BOARD.get({}) is None
    assert env_table.BOARD.get(env_table.render({env_table.BOARD: (7, 0)})) == (7, 0)


def test_pipe_of_joins_is_a_descriptor_an_inode_and_a_number() -> None:
    assert env_table.JOINING.get({}) is None
    assert env_table.JOINING.get(env_table.render({env_table.JOINING: (7, 4711, 0)})) == (7, 4711, 0)
    with pytest.raises(InvalidArgument, match="three numbers with colons between"):
        env_table.JOINING.get({"ACCELERATE_CPP_JOINING": "7:0"})


@pytest.mark.parametrize("text", ["7", "7:", ":1", "7:x", "-1:0"])
def test_other_places_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="two numbers with a colon between"):
        env_table.BOARD.get({"ACCELERATE_CPP_BOARD": text})


def test_variables_of_a_prefix_are_restored_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEPT", "before")
    monkeypatch.setenv("SOME_GONE", "before")
    monkeypatch.setenv("OTHER", "before")
    with env_table.restored_environment("SOME_"):
        os.environ.update(SOME_KEPT="after", SOME_NEW="x", OTHER="after")
        del os.environ["SOME_GONE"]
    found = {name: os.environ.get(name) for name in ("SOME_KEPT", "SOME_GONE", "SOME_NEW", "OTHER")}
    assert found == {"SOME_KEPT": "before", "SOME_GONE": "before", "SOME_NEW": None, "OTHER": "after"}


def test_exported_values_are_read_by_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    monkeypatch.delenv("ACCELERATE_BYPASS_DEVICE_MAP", raising=False)
    env_table.export({env_table.USE_CPU: True, env_table.BYPASS_DEVICE_MAP: None})
    assert os.environ["ACCELERATE_USE_CPU"] == "True"
    assert "ACCELERATE_BYPASS_DEVICE_MAP" not in os.environ
