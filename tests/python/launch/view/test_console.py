from __future__ import annotations

import fcntl
import os
import pty
from collections.abc import Iterator

import pytest

from accelerate_cpp.launch.view.console import HOLD_SECONDS, Console


class Screen:
    """A console of three ranks on a pipe or a terminal, with a clock that the test sets."""

    def __init__(self, read_end: int, write_end: int, plain_rank: int | None = 0) -> None:
        self.now = 0.0
        self._read_end, self._write_end = read_end, write_end
        self.console = Console(write_end, range(3), plain_rank, clock=lambda: self.now)
        self._sinks = [self.console.sink(rank) for rank in range(3)]

    def say(self, rank: int, text: str) -> None:
        self._sinks[rank](text.encode())

    def shown(self) -> str:
        """What has been written since the last call."""
        os.write(self._write_end, b"\0")
        text = b""
        while not text.endswith(b"\0"):
            text += os.read(self._read_end, 1 << 16)
        return text.removesuffix(b"\0").decode().replace("\r\n", "\n")

    def pass_time(self) -> None:
        self.now += HOLD_SECONDS
        self.console.show_due()


@pytest.fixture
def screen() -> Iterator[Screen]:
    ends = os.pipe()
    yield Screen(*ends)
    for end in ends:
        os.close(end)


@pytest.fixture
def terminal() -> Iterator[Screen]:
    ends = pty.openpty()
    yield Screen(*ends)
    for end in ends:
        os.close(end)


def test_line_of_all_ranks_is_shown_once_as_soon_as_the_last_has_said_it(screen: Screen) -> None:
    screen.say(0, "careful\n")
    screen.say(2, "careful\n")
    assert screen.shown() == ""
    screen.say(1, "careful\n")
    assert screen.shown() == "[×3] careful\n"
    assert screen.console.seconds_left() is None


def test_line_of_some_ranks_names_them_when_the_time_is_over(screen: Screen) -> None:
    screen.say(2, "mine\n")
    screen.say(1, "ours\n")
    screen.say(2, "ours\n")
    assert screen.console.seconds_left() == HOLD_SECONDS
    screen.pass_time()
    assert screen.shown() == "[2] mine\n[1-2 ×2] ours\n"


def test_line_of_the_plain_rank_alone_is_shown_as_it_is(screen: Screen) -> None:
    screen.say(0, "step 1\nstep 2\n")
    screen.pass_time()
    assert screen.shown() == "step 1\nstep 2\n"


def test_without_a_plain_rank_all_lines_have_their_rank() -> None:
    ends = os.pipe()
    all_marked = Screen(*ends, plain_rank=None)
    all_marked.say(0, "step 1\n")
    all_marked.pass_time()
    assert all_marked.shown() == "[0] step 1\n"
    for end in ends:
        os.close(end)


def test_plain_rank_may_be_on_another_machine() -> None:
    ends = os.pipe()
    elsewhere = Screen(*ends, plain_rank=7)
    elsewhere.say(0, "step 1\n")
    elsewhere.pass_time()
    assert elsewhere.shown() == "[0] step 1\n"
    for end in ends:
        os.close(end)


def test_rank_that_repeats_itself_is_shown_as_often(screen: Screen) -> None:
    screen.say(1, "again\nagain\n")
    screen.say(2, "again\n")
    screen.pass_time()
    assert screen.shown() == "[1-2 ×2] again\n[1] again\n"


def test_lines_keep_the_order_in_which_they_came_first(screen: Screen) -> None:
    screen.say(1, "alone\n")
    for rank in range(3):
        screen.say(rank, "together\n")
    assert screen.shown() == ""
    screen.pass_time()
    assert screen.shown() == "[1] alone\n[×3] together\n"


def test_blank_lines_have_no_mark(screen: Screen) -> None:
    for rank in range(3):
        screen.say(rank, "\n")
    assert screen.shown() == "\n"


def test_bytes_of_a_line_may_come_one_by_one(screen: Screen) -> None:
    for byte in "a×b\n".encode():
        screen._sinks[1](bytes([byte]))
    screen.pass_time()
    assert screen.shown() == "[1] a×b\n"


def test_line_whose_two_line_ends_come_apart_is_whole(screen: Screen) -> None:
    screen.say(1, "from Windows\r")
    screen.say(1, "\n")
    screen.pass_time()
    assert screen.shown() == "[1] from Windows\n"


def test_bar_of_the_plain_rank_moves_at_once(screen: Screen) -> None:
    for text in ("\r 0%", "\r50%", "\r100%\n", "done\n"):
        screen.say(0, text)
    assert screen.shown() == "\r 0%\r50%\r100%\n"
    screen.pass_time()
    assert screen.shown() == "done\n"


def test_bar_of_another_rank_is_shown_when_it_has_ended(screen: Screen) -> None:
    for text in ("\r 0%", "\r50%", "\r100%"):
        screen.say(1, text)
        screen.pass_time()
    assert screen.shown() == ""
    screen.say(1, "\n")
    screen.pass_time()
    assert screen.shown() == "[1] 100%\n"


def test_unfinished_line_is_shown_when_the_rank_ends(screen: Screen) -> None:
    screen.say(1, "no newline")
    screen.say(1, "")
    screen.say(0, "neither")
    screen.say(0, "")
    screen.console.show_all()
    assert screen.shown() == "[1] no newline\nneither"


def test_lines_of_others_interrupt_a_bar_in_a_file(screen: Screen) -> None:
    screen.say(0, "\r50%")
    screen.say(1, "look\n")
    screen.pass_time()
    screen.say(0, "\n")
    screen.say(0, "next\n")
    screen.pass_time()
    assert screen.shown() == "\r50%\n[1] look\nnext\n"


def test_lines_of_others_go_above_a_bar_on_a_terminal(terminal: Screen) -> None:
    terminal.say(0, "\r50%")
    terminal.say(1, "look\n")
    terminal.pass_time()
    terminal.say(0, "\r60%")
    assert terminal.shown() == "\r50%\r\x1b[K[1] look\n\r50%\r60%"


def test_line_before_a_bar_still_waits_for_others_on_a_terminal(terminal: Screen) -> None:
    terminal.say(0, "careful\n\r 0%")
    terminal.say(1, "careful\n")
    terminal.say(2, "careful\n")
    assert terminal.shown() == "\r 0%\r\x1b[K[×3] careful\n\r 0%"


def test_endless_line_and_a_flood_of_lines_do_not_pile_up(screen: Screen) -> None:
    fcntl.fcntl(screen._write_end, fcntl.F_SETPIPE_SZ, 1 << 20)
    screen.say(1, "x" * 200_000)
    screen.console.show_all()
    assert "[1] x" in _drained(screen)
    screen.say(1, "".join(f"{number}\n" for number in range(3000)))
    assert "[1] 0\n[1] 1\n" in _drained(screen)


def _drained(screen: Screen) -> str:
    os.set_blocking(screen._read_end, False)
    text = b""
    while True:
        try:
            text += os.read(screen._read_end, 1 << 16)
        except BlockingIOError:
            os.set_blocking(screen._read_end, True)
            return text.decode()


def test_line_of_the_launchers_own_comes_after_those_that_wait(screen: Screen) -> None:
    screen.say(1, "said before\n")
    screen.say(0, "begun")
    screen.console.announce("by the way")
    assert screen.shown() == "[1] said before\nby the way\n"
    screen.say(0, " and done\n")
    screen.pass_time()
    assert screen.shown() == "begun and done\n"


def test_line_that_comes_in_pieces_is_not_cut_by_lines_of_others(screen: Screen) -> None:
    screen.say(0, "loss")
    screen.say(1, "look\n")
    screen.say(0, " ")
    screen.say(2, "look\n")
    screen.say(0, "0.5")
    screen.say(0, "\n")
    screen.pass_time()
    assert screen.shown() == "[1-2 ×2] look\nloss 0.5\n"


def test_line_that_comes_in_pieces_can_be_said_by_all(screen: Screen) -> None:
    for rank in range(3):
        for piece in ("care", "ful", "\n"):
            screen.say(rank, piece)
    assert screen.shown() == "[×3] careful\n"


def test_line_without_an_end_is_shown_after_a_moment_and_then_as_it_grows(terminal: Screen) -> None:
    terminal.say(0, "name")
    terminal.say(0, "?")
    assert terminal.shown() == ""
    assert terminal.console.seconds_left() == HOLD_SECONDS
    terminal.now += HOLD_SECONDS / 2
    terminal.say(0, " ")
    assert terminal.console.seconds_left() == pytest.approx(HOLD_SECONDS / 2)
    terminal.pass_time()
    assert terminal.shown() == "name? "
    assert terminal.console.seconds_left() is None
    terminal.say(0, "me")
    terminal.say(1, "look\n")
    terminal.pass_time()
    assert terminal.shown() == "me\r\x1b[K[1] look\nname? me"


def test_next_line_waits_its_own_time(screen: Screen) -> None:
    screen.say(0, "first")
    screen.now += HOLD_SECONDS / 2
    screen.say(0, "\nsecond")
    screen.console.show_all()
    assert screen.shown() == "first\nsecond"
    screen.say(0, "\nthird")
    assert screen.console.seconds_left() == pytest.approx(HOLD_SECONDS)
