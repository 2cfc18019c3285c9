"""The menu, on a real terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

Start = Callable[..., Any]

SCRIPT = """
import sys
from accelerate_cpp.commands import menu
rows = ["first", "second", "third and a long one"]
try:
    for start in map(int, sys.argv[1:]):
        print("possible", menu.is_possible())
        print("chosen", menu.choose(rows, start))
except KeyboardInterrupt:
    sys.exit(130)
except EOFError as error:
    sys.exit(f"ended: {error}")
"""


def chosen(program: Any) -> int:
    program.expect("chosen ")
    return int(program.expect("\r\n"))


@pytest.mark.parametrize(
    ("start", "keys", "index"),
    [
        (0, "\r", 0),
        (2, "\r", 2),
        (0, "\x1b[B\r", 1),
        (0, "\x1bOB\x1b[B\x1b[A\r", 1),
        (0, "jj\r", 2),
        (2, "k\n", 1),
        (0, "k\r", 2),
        (2, "j\r", 0),
        (0, "3\r", 2),
        (0, "9\r", 0),
        (1, "xyz \x1b[C\x1b[1;5D\x1b[3~\x1aj\r", 2),
    ],
)
def test_keys_move_and_enter_chooses(start: int, keys: str, index: int, terminal: Start) -> None:
    program = terminal("-c", SCRIPT, str(start))
    assert "possible True" in program.expect("third")
    program.send(keys)
    assert chosen(program) == index
    assert program.ended() == 0
    assert program.modes() == program.modes_before


def test_an_arrow_may_come_in_pieces(terminal: Start) -> None:
    program = terminal("-c", SCRIPT, "0")
    program.expect("third")
    for key in "\x1b[B":
        program.send(key)
    program.expect("> 2  second")
    program.send("\r")
    assert chosen(program) == 1


def test_only_the_chosen_row_stays(terminal: Start) -> None:
    program = terminal("-c", SCRIPT, "0")
    program.expect("third")
    program.send("2\r")
    program.expect("\x1b[J  second\r\n")
    assert chosen(program) == 1


def test_keys_typed_ahead_are_for_the_next_menu(terminal: Start) -> None:
    program = terminal("-c", SCRIPT, "0", "0")
    program.expect("third")
    program.send("j\rjj\r")
    assert (chosen(program), chosen(program)) == (1, 2)


@pytest.mark.parametrize(
    ("keys", "status", "words"), [("\x03", 130, ""), ("j\x03", 130, ""), ("\x04", 1, "ended: the input ended")]
)
def test_the_terminal_is_restored_when_the_user_leaves(keys: str, status: int, words: str, terminal: Start) -> None:
    program = terminal("-c", SCRIPT, "0")
    program.expect("third")
    assert program.modes() != program.modes_before
    program.send(keys)
    assert program.ended() == status
    assert words in program.seen
    assert "\x1b[?25h" in program.seen
    assert program.modes() == program.modes_before


def test_the_terminal_is_restored_when_the_program_is_terminated(terminal: Start) -> None:
    program = terminal("-c", SCRIPT, "0")
    program.expect("third")
    program.process.send_signal(signal.SIGTERM)
    assert program.ended() == 128 + signal.SIGTERM
    assert program.modes() == program.modes_before


def test_rows_that_are_too_long_are_cut_to_one_line(terminal: Start) -> None:
    program = terminal("-c", SCRIPT, "0", columns=12)
    program.expect("3  thir")
    program.send("3")
    program.expect("> 3  ")
    row = program.expect("\r\n").strip()
    assert "third and a long one".startswith(row)
    assert len("> 3  " + row) < 12
    program.send("\r")
    assert chosen(program) == 2


def test_there_is_no_menu_on_a_terminal_that_cannot_move_its_cursor(terminal: Start) -> None:
    script = "from accelerate_cpp.commands import menu; print('possible', menu.is_possible())"
    for kind in ("dumb", "no-such-terminal"):
        assert "False" in terminal("-c", script, TERM=kind).expect("\r\n")
