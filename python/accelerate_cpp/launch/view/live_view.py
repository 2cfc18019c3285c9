"""Shows the progress of the workers while they run: on a terminal, in a log, or in a cell."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence

from accelerate_cpp.launch.view.causes import Causes
from accelerate_cpp.launch.view.live_table import table_html, table_lines, table_sentence
from accelerate_cpp.launch.view.screen import Screen
from accelerate_cpp.launch.view.slowest_rank import stragglers
from accelerate_cpp.runtime.progress_board import Board, Standing

Show = Callable[[Sequence[Standing], int, bool], object]
"""Shows standings at a time of the monotonic clock, in nanoseconds, and whether they are the last."""

LOOK_SECONDS = 0.5
LOG_SECONDS = 10.0
CELL_DELAY_SECONDS = 3.0
_CELL_WIDTH = 120


class LiveView:
    """Looks at a board at intervals, and at the end, once a worker has made a step.

    Args:
        delay_seconds: of a run that is over before, only the end is shown.
    """

    def __init__(
        self, board: Board, show: Show, delay_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board = board
        self._show = show
        self._clock = clock
        self._due = clock() + delay_seconds
        self._causes = Causes()

    def seconds_left(self) -> float:
        """How long until the next look."""
        return max(0.0, self._due - self._clock())

    def show_due(self) -> None:
        """Shows the standings if it is time."""
        if self._clock() >= self._due:
            self._due = self._clock() + LOOK_SECONDS
            self._look(is_last=False)

    def show_all(self) -> None:
        """Shows the standings at the end of the run."""
        self._look(is_last=True)

    def _look(self, is_last: bool) -> None:
        standings = self._causes.explained(self._board.look(), self._clock())
        if any(standing.steps for standing in standings):
            self._show(standings, int(self._clock() * 1e9), is_last)


def on_screen(screen: Screen) -> Show:
    """A table at the bottom of the terminal."""

    def show(standings: Sequence[Standing], now_ns: int, is_last: bool) -> None:
        columns, lines = screen.size
        screen.draw(["─" * (columns - 1), *table_lines(standings, now_ns, columns - 1, lines // 2, is_last)])

    return show


class Log:
    """A line every :data:`LOG_SECONDS`, as soon as a rank falls behind, and at the end."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._due_ns = 0
        self._named: set[int] = set()
        self._shown: list[int] = []

    def __call__(self, standings: Sequence[Standing], now_ns: int, is_last: bool) -> None:
        slow = {straggler.rank for straggler in stragglers(standings)}
        steps = [standing.steps for standing in standings]
        is_due = now_ns >= self._due_ns
        if is_due or slow - self._named or (is_last and steps != self._shown):
            self._shown = steps
            self._write(table_sentence(standings, now_ns, is_last))
            self._due_ns = now_ns + int(LOG_SECONDS * 1e9)
            self._named = slow if is_due else self._named | slow


def in_cell(display: Callable[[str, str], object]) -> Show:
    """A table in a cell; ``display`` takes it as text and as HTML."""

    def show(standings: Sequence[Standing], now_ns: int, is_last: bool) -> None:
        height = shutil.get_terminal_size().lines
        text = "\n".join(table_lines(standings, now_ns, _CELL_WIDTH, height, is_last))
        display(text, table_html(standings, now_ns, is_last))

    return show
