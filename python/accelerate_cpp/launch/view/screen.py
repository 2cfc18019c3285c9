"""The terminal while a table stands at its bottom: what is printed scrolls above it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial

from accelerate_cpp.launch.workers.worker_output import LONGEST_LINE_BYTES, Descriptor, visible

_TO_LINE_START = b"\r"
_ERASE_BELOW = b"\x1b[J"
# Colours, cursor movements and other control characters, which have no width.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x1f\x7f]")
_USUAL_SIZE = os.terminal_size((80, 24))


class Screen:
    """Writes the text of several streams on one terminal, above a table that is drawn again after each.

    Unfinished lines, progress bars for instance, stand between, cut to the width of the terminal; they are printed as
    they are when they end.
    """

    def __init__(self, descriptor: int, size: Callable[[], os.terminal_size] | None = None) -> None:
        self._write = Descriptor(descriptor)
        self._size = size or partial(_size_of, descriptor)
        self._unfinished: dict[int, bytes] = {}
        self._table: Sequence[str] = ()
        self._lines_below = 0  # those that are drawn below what has been printed

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines of the terminal as it is now."""
        return self._size()

    def stream(self, number: int) -> Callable[[bytes], object]:
        """What takes the bytes of one stream."""
        return partial(self._print, number)

    def draw(self, table: Sequence[str]) -> None:
        """Replaces the table."""
        self._table = table
        self._redraw(b"")

    def close(self) -> None:
        """Leaves the table as it is, and what comes next begins below it."""
        table, self._table = self._table, ()
        left = b"".join(line + b"\n" for line in self._unfinished.values() if line)
        self._unfinished.clear()
        self._redraw(left + b"".join(line.encode() + b"\n" for line in table))

    def _print(self, number: int, chunk: bytes) -> None:
        text = self._unfinished.get(number, b"") + chunk
        whole, newline, rest = text.rpartition(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            whole, newline, rest = text, b"\n", b""
        self._unfinished[number] = visible(rest)
        self._redraw(whole + newline)

    def _redraw(self, above: bytes) -> None:
        """Prints ``above``, which ends with a line end, where the lines below were, and them below it."""
        width = self._size().columns - 1  # a full line may or may not move the cursor on
        begun = [_plain(line) for line in self._unfinished.values()]
        below = [line[:width].encode() for line in (*filter(None, begun), *self._table)]
        back = b"\x1b[%dA" % (self._lines_below - 1) if self._lines_below > 1 else b""
        self._write(_TO_LINE_START + back + _ERASE_BELOW + above + b"\n".join(below))
        self._lines_below = len(below)


def _size_of(terminal: int) -> os.terminal_size:
    """Its columns and lines; the usual ones where it has been told none, or is gone."""
    try:
        size = os.get_terminal_size(terminal)
    except OSError:
        return _USUAL_SIZE
    return size if size.columns and size.lines else _USUAL_SIZE


def _plain(line: bytes) -> str:
    return _CONTROL.sub("", line.decode(errors="replace"))
