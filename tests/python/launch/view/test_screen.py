from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator

import pytest

from accelerate_cpp.launch.view import screen
from accelerate_cpp.launch.view.screen import Screen

_TOKEN = re.compile(r"\x1b\[(\d*)([AJKm])|(.)", re.DOTALL)


class Terminal:
    """What a terminal of 20 columns shows of what has been written, for the few codes that are used."""

    def __init__(self) -> None:
        self._read_end, write_end = os.pipe()
        self._write_end = write_end
        self.screen = Screen(write_end, size=lambda: os.terminal_size((20, 10)))
        self._lines, self._row, self._column = [""], 0, 0

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)

    def shown(self) -> list[str]:
        os.write(self._write_end, b"\0")
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(self._read_end, 1 << 16)
        for number, code, character in _TOKEN.findall(text[:-1].decode()):
            self._take(int(number or 0), code, character)
        return self._lines

    def _take(self, number: int, code: str, character: str) -> None:
        line = self._lines[self._row]
        if code == "A":
            self._row -= number
        elif code == "J":
            self._lines[self._row :] = [line[: self._column]]
        elif code == "K":
            self._lines[self._row] = line[: self._column]
        elif character == "\r":
            self._column = 0
        elif character == "\n":
            self._row, self._column = self._row + 1, 0
            self._lines += [""] * (self._row == len(self._lines))
        elif character:
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_text_scrolls_above_the_table(terminal: Terminal) -> None:
    write = terminal.screen.stream(1)
    write(b"before\n")
    terminal.screen.draw(["head", "row"])
    write(b"one\ntwo\n")
    assert terminal.shown() == ["before", "one", "two", "head", "row"]


def test_table_is_replaced(terminal: Terminal) -> None:
    terminal.screen.draw(["head", "row", "remark"])
    terminal.shown()
    terminal.screen.draw(["head", "new"])
    assert terminal.shown() == ["head", "new"]


def test_unfinished_lines_stand_between_and_are_printed_once_when_they_end(terminal: Terminal) -> None:
    terminal.screen.draw(["table"])
    out, err = terminal.screen.stream(1), terminal.screen.stream(2)
    err(b"\r 10%")
    err(b"\r 20%")
    out(b"be")
    assert terminal.shown() == [" 20%", "be", "table"]
    out(b"gun\n")
    err(b"\r100%\n")
    assert terminal.shown() == ["begun", "100%", "table"]


def test_line_that_ends_with_a_carriage_return_stays_visible(terminal: Terminal) -> None:
    terminal.screen.stream(2)(b"10%\r20%\r")
    assert terminal.shown() == ["20%"]


def test_long_and_coloured_lines_take_one_line_each(terminal: Terminal) -> None:
    terminal.screen.stream(2)(b"\x1b[31m" + b"x" * 50)
    terminal.screen.draw(["y" * 50])
    assert terminal.shown() == ["x" * 19, "y" * 19]
    terminal.screen.draw(["z"])
    assert terminal.shown() == ["x" * 19, "z"]


def test_at_the_end_everything_stays_and_what_follows_comes_below(terminal: Terminal) -> None:
    terminal.screen.draw(["head", "row"])
    terminal.screen.stream(1)(b"no line end")
    terminal.screen.close()
    assert terminal.shown() == ["no line end", "head", "row", ""]


def test_endless_line_is_broken(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "LONGEST_LINE_BYTES", 100)
    terminal.screen.stream(1)(b"x" * 101)
    assert [len(line) for line in terminal.shown()] == [101, 0]


def test_terminal_without_a_size_has_the_usual_one() -> None:
    ends = pty.openpty()
    assert Screen(ends[1]).size == (80, 24)
    fcntl.ioctl(ends[1], termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    assert Screen(ends[1]).size == (100, 30)
    for end in ends:
        os.close(end)
    assert Screen(ends[1]).size == (80, 24)
