"""The output of the workers of a run on one terminal: each line with its ranks, once if several print the same."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from accelerate_cpp.config.env_table import render_cores as ranges
from accelerate_cpp.launch.workers.worker import Sink
from accelerate_cpp.launch.workers.worker_output import LONGEST_LINE_BYTES, Descriptor, visible

HOLD_SECONDS = 0.2
"""How long a line waits for other ranks to print the same, and an unfinished one of the plain rank for its end."""
_MOST_HELD_LINES = 1000
_ERASE_LINE = b"\r\x1b[K"


@dataclass
class _Line:
    """A whole line that waits to be shown, and who has said it."""

    text: bytes
    due: float
    ranks: list[int]


class Console:
    """Joins a stream of several ranks on one descriptor.

    Lines keep the order in which they came first. One that all ranks have said is shown as ``[×8] text``, one that only
    some say within :data:`HOLD_SECONDS` as ``[1,4-6 ×4] text``, or ``[1] text``. What only ``plain_rank`` says is shown
    as it is; its unfinished line is shown when it has waited as long for its end, a progress bar (with a carriage
    return in it) at once. From then on it is shown as it grows, and stays below the lines of others. Unfinished lines
    of other ranks wait for their end.

    Args:
        write: writes on the descriptor; ``None``: it is written to as it is.
    """

    def __init__(
        self,
        descriptor: int,
        ranks: Iterable[int],
        plain_rank: int | None = 0,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[bytes], object] | None = None,
    ) -> None:
        self._write = write or Descriptor(descriptor)
        self._is_terminal = os.isatty(descriptor)
        self._unfinished = dict.fromkeys(ranks, b"")  # the plain rank's is on the descriptor
        self._begun = b""  # of the plain rank's unfinished line, not on the descriptor yet
        self._begun_due = 0.0
        self._plain_rank = plain_rank if plain_rank in self._unfinished else None
        self._clock = clock
        self._held: deque[_Line] = deque()
        self._is_interrupted = False  # the plain rank's line, by a line end that it has yet to write itself

    def sink(self, rank: int) -> Sink:
        """What takes the bytes of ``rank``; an empty chunk ends its last line."""
        return partial(self._take_plain if rank == self._plain_rank else self._take, rank)

    def seconds_left(self) -> float | None:
        """How long until :meth:`show_due` has something to do; ``None`` when nothing waits."""
        due = [self._held[0].due] if self._held else []
        if self._begun:
            due.append(self._begun_due)
        return max(0.0, min(due) - self._clock()) if due else None

    def show_due(self) -> None:
        """Shows the lines that have waited long enough, or for which there is no rank to wait for."""
        while self._held and (
            len(self._held[0].ranks) == len(self._unfinished)
            or self._held[0].due <= self._clock()
            or len(self._held) > _MOST_HELD_LINES
        ):
            self._show(self._held.popleft())
        if self._begun and self._begun_due <= self._clock():
            self._show_begun()

    def show_all(self) -> None:
        """Shows every line that waits, also an unfinished one."""
        self._show_held()
        self._show_begun()

    def announce(self, sentence: str) -> None:
        """Shows a line of the launcher's own, after those that wait, but before an unfinished one that does."""
        self._show_held()
        self._put(sentence.encode() + b"\n")

    def _take_plain(self, rank: int, chunk: bytes) -> None:
        ends = not chunk
        if self._is_interrupted and chunk:
            chunk, self._is_interrupted = chunk.removeprefix(b"\n"), False
        begun = self._unfinished[rank]
        if begun:
            first, newline, chunk = chunk.partition(b"\n")
            self._write(first + newline)
            self._unfinished[rank] = b"" if newline else visible(begun + first)
        due = self._begun_due if self._begun and b"\n" not in chunk else self._clock() + HOLD_SECONDS
        *lines, rest = (self._begun + chunk).split(b"\n")
        self._begun = b""
        for line in lines:
            self._hold(rank, line)
        self._begun, self._begun_due = rest, due
        if ends or b"\r" in rest or len(rest) > LONGEST_LINE_BYTES:
            self._show_begun()

    def _show_begun(self) -> None:
        """Shows what there is of the plain rank's unfinished line, which then grows on the descriptor."""
        if self._begun and self._plain_rank is not None:
            if not self._is_terminal:  # on a terminal lines can be put above it
                self._show_held()
            self._write(self._begun)
            self._unfinished[self._plain_rank], self._begun = visible(self._begun), b""

    def _show_held(self) -> None:
        while self._held:
            self._show(self._held.popleft())

    def _take(self, rank: int, chunk: bytes) -> None:
        *lines, rest = (self._unfinished[rank] + chunk).split(b"\n")
        if rest and (not chunk or len(rest) > LONGEST_LINE_BYTES):
            lines, rest = [*lines, rest], b""
        self._unfinished[rank] = visible(rest)
        for line in lines:
            self._hold(rank, line.rstrip(b"\r").rpartition(b"\r")[2])

    def _hold(self, rank: int, text: bytes) -> None:
        for line in self._held:
            if line.text == text and rank not in line.ranks:
                line.ranks.append(rank)
                break
        else:
            self._held.append(_Line(text, self._clock() + HOLD_SECONDS, [rank]))
        self.show_due()

    def _show(self, line: _Line) -> None:
        self._put(self._mark(line) + line.text + b"\n")

    def _put(self, text: bytes) -> None:
        plain = self._plain_rank
        if plain is None or not self._unfinished[plain]:
            self._write(text)
        elif self._is_terminal:
            self._write(_ERASE_LINE + text + self._unfinished[plain])
        else:
            self._write(b"\n" + text)
            self._unfinished[plain], self._is_interrupted = b"", True

    def _mark(self, line: _Line) -> bytes:
        count = len(line.ranks)
        if line.ranks == [self._plain_rank] or not line.text.strip():
            return b""
        if count == 1:
            return f"[{line.ranks[0]}] ".encode()
        everyone = count == len(self._unfinished)
        return (f"[×{count}] " if everyone else f"[{ranges(line.ranks)} ×{count}] ").encode()
