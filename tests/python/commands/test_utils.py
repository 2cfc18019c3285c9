from __future__ import annotations

import argparse

import pytest

from accelerate_cpp.commands.utils import CustomArgumentParser, integer_from


@pytest.fixture
def parser() -> CustomArgumentParser:
    parser = CustomArgumentParser("tool")
    parser.add_argument("--num_processes", type=integer_from(1))
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("script")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def _refusal(parser: CustomArgumentParser, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        parser.parse_args(arguments)
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize("arguments", [["--num_processes", "3"], ["--num-processes", "3"], ["--num-processes=3"]])
def test_dashes_stand_for_underscores(parser: CustomArgumentParser, arguments: list[str]) -> None:
    assert parser.parse_args([*arguments, "x.py"]).num_processes == 3


def test_flags_after_the_script_are_the_scripts(parser: CustomArgumentParser) -> None:
    parsed = parser.parse_args(["-q", "x.py", "--unknown", "--num_processes", "no number"])
    assert parsed.rest == ["--unknown", "--num_processes", "no number"]


@pytest.mark.parametrize(
    ("arguments", "unknown"),
    [
        (["--num_procs", "3", "x.py"], "--num_procs"),
        (["--num-procs=3", "x.py"], "--num-procs"),
        (["--num_processes", "3", "--num_procs", "3"], "--num_procs"),
        (["--num", "3", "x.py"], "--num"),
    ],
)
def test_unknown_flag_is_named_with_the_nearest_one(
    parser: CustomArgumentParser, capsys: pytest.CaptureFixture[str], arguments: list[str], unknown: str
) -> None:
    assert _refusal(parser, arguments, capsys) == (
        f"tool: unknown flag {unknown}; the nearest known flag is --num_processes\n"
    )


def test_unknown_short_flag_is_named(parser: CustomArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag -z" in _refusal(parser, ["-z", "x.py"], capsys)


def test_missing_script_is_named(parser: CustomArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    assert "script" in _refusal(parser, ["-q"], capsys)


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_value_that_is_no_such_integer_is_shown(
    parser: CustomArgumentParser, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert _refusal(parser, [f"--num_processes={text}", "x.py"], capsys) == (
        f"tool: --num_processes: expected an integer of at least 1, got {text!r}\n"
    )


def test_integer_has_bounds_on_both_sides() -> None:
    parse = integer_from(0, 65535)
    assert (parse("0"), parse("65535")) == (0, 65535)
    with pytest.raises(argparse.ArgumentTypeError, match="from 0 to 65535"):
        parse("65536")


def test_help_lists_each_flag_once_with_underscores(parser: CustomArgumentParser) -> None:
    assert "--num_processes" in parser.format_help()
    assert "--num-processes" not in parser.format_help()
