"""A menu on a terminal: arrows, j and k, or digits move, Enter chooses, Ctrl-C ends the program."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

try:
    import curses
    import termios
except ImportError:  # a system without terminals of this kind
    curses = termios = None  # type: ignore[assignment]

_UP, _DOWN, _ENTER = "up", "down", "enter"
_END_OF_INPUT = b"\x04"  # Ctrl-D
_KEYS = {b"k": _UP, b"j": _DOWN, b"\r": _ENTER, b"\n": _ENTER}
_ARROWS = {b"A": _UP, b"B": _DOWN}
_HIDE_CURSOR, _SHOW_CURSOR, _CLEAR_BELOW = "\x1b[?25l", "\x1b[?25h", "\x1b[J"


def is_possible() -> bool:
    """Whether both standard input and standard output are a terminal on which lines can be redrawn."""
    if termios is None or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        curses.setupterm()
    except curses.error:  # nothing is known about it
        return False
    return curses.tigetstr("cuu1") is not None


def choose(rows: Sequence[str], selected: int) -> int:
    """Lets the user choose one of ``rows``, which are shown one below the other.

    Args:
        selected: the index of the row that is selected first.

    Returns:
        The index of the chosen row; only that row stays on the screen.

    Raises:
        EOFError: the terminal is gone, or the user pressed Ctrl-D.
        KeyboardInterrupt: Ctrl-C. The terminal is restored in all cases.
    """
    descriptor = sys.stdin.fileno()
    with _single_keys(descriptor):
        _draw(rows, selected)
        for key in _keys(descriptor):
            if key == _ENTER:
                break
            if key in (_UP, _DOWN):
                selected = (selected + (1 if key == _DOWN else -1)) % len(rows)
            elif 1 <= int(key) <= len(rows):
                selected = int(key) - 1
            _move_up(len(rows))
            _draw(rows, selected)
        _move_up(len(rows))
        print(f"{_CLEAR_BELOW}  {_fitting(rows[selected])}", flush=True)
    return selected


def _draw(rows: Sequence[str], selected: int) -> None:
    for index, row in enumerate(rows):
        mark = ">" if index == selected else " "
        print(f"\r{_CLEAR_BELOW}{mark} {_fitting(f'{index + 1}  {row}')}")
    sys.stdout.flush()


def _fitting(text: str) -> str:
    """``text`` cut to one line, because moving up counts lines."""
    return text[: max(1, shutil.get_terminal_size().columns - 3)]


def _move_up(lines: int) -> None:
    print(f"\x1b[{lines}A\r", end="")


def _keys(descriptor: int) -> Iterator[str]:
    """The key that is pressed: up, down, enter, or a digit; other keys are ignored."""
    sequence = b""  # the bytes of an arrow: escape, a bracket or an O, a letter
    while True:
        byte = _byte(descriptor)
        if sequence == b"\x1b" and byte in (b"[", b"O"):
            sequence += byte
        elif len(sequence) == 2:
            if byte.isalpha() or byte == b"~":
                sequence = b""
            if byte in _ARROWS:
                yield _ARROWS[byte]
        elif byte == b"\x1b":
            sequence = byte
        else:
            sequence = b""
            if byte in _KEYS or byte.isdigit():
                yield _KEYS.get(byte) or byte.decode()


def _byte(descriptor: int) -> bytes:
    try:
        byte = os.read(descriptor, 1)  # one by one: keys that are typed ahead belong to the next question
    except OSError as error:
        raise EOFError("the terminal is gone") from error
    if byte in (b"", _END_OF_INPUT):
        raise EOFError("the input ended")
    return byte


@contextmanager
def _single_keys(descriptor: int) -> Iterator[None]:
    """Inside this block the terminal returns each key at once without showing it; it is always restored afterwards."""
    before = termios.tcgetattr(descriptor)
    modes = termios.tcgetattr(descriptor)
    modes[3] &= ~(termios.ICANON | termios.ECHO)
    # Ctrl-Z would leave the terminal in this state for the shell.
    modes[6][termios.VMIN], modes[6][termios.VTIME], modes[6][termios.VSUSP] = 1, 0, b"\0"
    former = signal.signal(signal.SIGTERM, _leave)
    try:
        termios.tcsetattr(descriptor, termios.TCSANOW, modes)
        print(_HIDE_CURSOR, end="")
        yield
    finally:
        print(_SHOW_CURSOR, end="", flush=True)
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
        signal.signal(signal.SIGTERM, former)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
