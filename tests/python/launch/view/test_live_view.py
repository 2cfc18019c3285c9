from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from accelerate_cpp.launch.view.live_view import LOG_SECONDS, LOOK_SECONDS, LiveView, Log, in_cell, on_screen
from accelerate_cpp.launch.view.screen import Screen
from accelerate_cpp.runtime.progress_board import Board, Standing, board, open_slot

SECOND = 1_000_000_000
FAST = Standing(0, 11, 1.0, 1 << 20, 0, SECOND, [0.1] * 10, [0.06] * 10, has_waited=True)
SLOW = replace(FAST, rank=1, waited_seconds=[0.0] * 10)
AS_FAST = replace(FAST, rank=1)


class Watch:
    """A view of a board of one rank, with a clock that the test sets."""

    def __init__(self, watched: Board, delay_seconds: float) -> None:
        self.now = 100.0
        self.seen: list[tuple[Sequence[Standing], int, bool]] = []
        self._slot = open_slot((watched.descriptor, 0), 1)
        self.view = LiveView(watched, lambda *seen: self.seen.append(seen), delay_seconds, clock=lambda: self.now)

    def step(self) -> None:
        assert self._slot is not None
        self._slot.add_step(int(self.now * 1e9), 0)


@pytest.fixture
def watched() -> Iterator[Board]:
    with board(range(1)) as made:
        yield made


def test_standings_are_shown_at_intervals(watched: Board) -> None:
    watch = Watch(watched, 0.0)
    watch.step()
    assert watch.view.seconds_left() == 0.0
    watch.view.show_due()
    watch.view.show_due()
    assert [at for _, at, _ in watch.seen] == [100 * SECOND]
    assert watch.view.seconds_left() == LOOK_SECONDS
    watch.now += LOOK_SECONDS
    watch.view.show_due()
    assert len(watch.seen) == 2


def test_run_without_a_step_shows_nothing(watched: Board) -> None:
    watch = Watch(watched, 3.0)
    watch.now += 4.0
    watch.view.show_due()
    watch.view.show_all()
    assert watch.seen == []


def test_of_a_run_that_is_over_before_the_delay_the_end_is_shown(watched: Board) -> None:
    watch = Watch(watched, 3.0)
    watch.step()
    watch.now += 2.0
    watch.view.show_due()
    assert watch.seen == []
    assert watch.view.seconds_left() == 1.0
    watch.view.show_all()
    assert [(at, is_last) for _, at, is_last in watch.seen] == [(102 * SECOND, True)]


def test_end_of_a_run_is_shown_whether_it_is_due_or_not(watched: Board) -> None:
    watch = Watch(watched, 0.0)
    watch.step()
    watch.view.show_due()
    watch.step()
    watch.view.show_all()
    assert [(standings[0].steps, is_last) for standings, _, is_last in watch.seen] == [(1, False), (2, True)]


def test_log_has_a_line_at_intervals() -> None:
    lines: list[str] = []
    log = Log(lines.append)
    for seconds in (0.0, 1.0, LOG_SECONDS - 1.0, LOG_SECONDS, LOG_SECONDS + 1.0):
        log([FAST, AS_FAST], int(seconds * 1e9), False)
    assert len(lines) == 2


def test_log_has_a_line_at_the_end() -> None:
    lines: list[str] = []
    log = Log(lines.append)
    log([FAST, AS_FAST], 0, False)
    log([replace(FAST, steps=12), replace(AS_FAST, steps=12)], 1, True)
    log([replace(FAST, steps=12), replace(AS_FAST, steps=12)], 2, True)
    assert [line.partition(",")[0] for line in lines] == ["step 11", "step 12"]


def test_log_names_a_slow_rank_at_once_and_then_with_the_other_lines() -> None:
    lines: list[str] = []
    log = Log(lines.append)
    said = []
    for at, standings in enumerate(([FAST, AS_FAST], [FAST, SLOW], [FAST, SLOW], [FAST, AS_FAST], [FAST, SLOW])):
        log(standings, at, False)
        said.append(len(lines))
    assert said == [1, 2, 2, 2, 2]
    assert "rank 1 is slower" in lines[1]
    log([FAST, SLOW], int((LOG_SECONDS + 1) * 1e9), False)
    assert "rank 1 is slower" in lines[2]


def test_table_on_a_terminal_leaves_half_of_it_free() -> None:
    read_end, write_end = os.pipe()
    on_screen(Screen(write_end, size=lambda: os.terminal_size((40, 12))))(
        [replace(FAST, rank=rank) for rank in range(50)], SECOND, False
    )
    drawn = os.read(read_end, 1 << 16).decode()
    os.close(read_end)
    os.close(write_end)
    assert drawn.count("\n") == 6
    assert "and 46 more ranks" in drawn


def test_cell_gets_text_and_html() -> None:
    shown: list[Any] = []
    in_cell(lambda *both: shown.append(both))([FAST, SLOW], SECOND, False)
    [(text, page)] = shown
    assert text.splitlines()[0].split()[0] == "rank"
    assert page.startswith("<table>")
    assert "rank 1 is slower" in text
    assert "rank 1 is slower" in page
