from __future__ import annotations

from dataclasses import replace

from accelerate_cpp.launch.view.live_table import table_html, table_lines, table_sentence
from accelerate_cpp.runtime.progress_board import Standing

SECOND = 1_000_000_000
FAST = Standing(
    0,
    steps=12,
    loss=0.51239,
    resident_bytes=300 << 20,
    last_ns=SECOND,
    step_seconds=[0.1] * 10,
    waited_seconds=[0.06] * 10,
    has_waited=True,
)
SLOW = replace(FAST, rank=1, waited_seconds=[0.001] * 10, resident_bytes=3 << 30)
NEW = Standing(2)


def test_table_has_a_row_for_each_rank_and_what_is_unknown_is_left_open() -> None:
    assert table_lines([FAST, SLOW, NEW], SECOND, 80, 20) == [
        "rank  step  steps/s    loss   memory  waiting",
        "   0    12       10  0.5124  300 MiB      60%",
        "   1    12       10  0.5124  3.0 GiB       1%",
        "   2     0        -       -        -        -",
    ]


def test_slow_rank_is_pointed_out() -> None:
    remark = "rank 1 is slower than the others by 59 ms a step"
    assert table_lines([FAST, SLOW], SECOND, 80, 20)[-1] == remark
    assert table_sentence([FAST, SLOW], SECOND).endswith(f"; {remark}")
    page = table_html([FAST, SLOW], SECOND)
    assert page.count("bold") == 1
    assert remark in page.partition("bold")[2]


def test_memory_of_accelerators_has_a_column_where_there_is_one() -> None:
    head, row, *_ = table_lines([replace(FAST, device_bytes=5 << 30), SLOW], SECOND, 80, 20)
    assert head.split()[-2:] == ["device", "waiting"]
    assert row.split()[-3:] == ["5.0", "GiB", "60%"]
    assert "on devices up to 5.0 GiB" in table_sentence([replace(FAST, device_bytes=5 << 30), SLOW], SECOND)


def test_unmeasured_waits_are_not_shown_as_none() -> None:
    unmeasured = replace(FAST, waited_seconds=[0.0] * 10, has_waited=False)
    assert table_lines([unmeasured], SECOND, 80, 20)[1].split()[-1] == "-"
    assert "waiting" not in table_sentence([unmeasured], SECOND)


def test_narrow_and_low_terminal_shows_the_slow_rank_first() -> None:
    many = [replace(SLOW if rank == 7 else FAST, rank=rank) for rank in range(20)]
    lines = table_lines(many, SECOND, 30, 6)
    assert len(lines) == 6
    assert all(len(line) <= 30 for line in lines)
    assert [line.split()[0] for line in lines[1:4]] == ["7", "0", "1"]
    assert lines[4] == "and 17 more ranks"


def test_many_slow_ranks_leave_room_for_the_table() -> None:
    many = [replace(SLOW if rank % 3 == 0 else FAST, rank=rank) for rank in range(32)]
    lines = table_lines(many, SECOND, 80, 10)
    assert len(lines) == 10
    assert lines[0].split()[0] == "rank"
    assert lines[-1].startswith("and ")
    assert lines[-1].endswith(" more remarks")


def test_cell_shows_a_bounded_number_of_rows() -> None:
    page = table_html([replace(FAST, rank=rank) for rank in range(1000)], SECOND)
    assert page.count("<tr>") == 64
    assert "and 937 more ranks" in page


def test_standstill_is_said_when_it_is_long_compared_with_steps() -> None:
    stands = "no rank has completed a step for 12 s"
    assert stands in table_lines([FAST], 13 * SECOND, 80, 20)
    assert stands not in table_lines([FAST], 5 * SECOND, 80, 20)
    slow_steps = replace(FAST, step_seconds=[5.0] * 10)
    assert stands not in table_lines([slow_steps], 13 * SECOND, 80, 20)


def test_position_and_time_left_are_said_where_the_length_of_the_data_is_known() -> None:
    ahead = replace(FAST, batches_read=150, batches=300, seconds_left=75.4)
    behind = replace(ahead, rank=1, batches_read=148, seconds_left=76.4)
    lines = table_lines([ahead, behind, NEW], 2 * SECOND, 80, 20)
    assert [line.split()[2] for line in lines[:4]] == ["batch", "150/300", "148/300", "-"]
    left = "about 1 min 15 s left of this pass over the data"  # the look is 1 s after the last step
    assert lines[4] == left
    assert table_sentence([ahead, behind], 2 * SECOND).startswith("step 12, batch 150/300 of this pass, 10 steps/s")
    assert table_sentence([ahead, behind], 2 * SECOND).endswith(left)
    assert "3 h 0 min left" in table_sentence([replace(ahead, seconds_left=10800.0)], SECOND)
    assert "9 s left" in table_sentence([replace(ahead, seconds_left=9.0)], SECOND)


def test_end_of_a_run_has_neither_time_left_nor_a_standstill() -> None:
    ended = replace(FAST, batches_read=300, batches=300, seconds_left=0.5)
    assert len(table_lines([ended], SECOND, 80, 20, is_last=True)) == 2
    assert "left" not in table_sentence([ended], SECOND, is_last=True)
    assert "no rank" not in table_html([ended], 99 * SECOND, is_last=True)


def test_line_says_the_slowest_the_mean_and_the_most() -> None:
    behind = replace(SLOW, steps=11, loss=1.0, step_seconds=[0.2] * 10)
    assert table_sentence([FAST, behind, NEW], SECOND) == (
        "step 0, 0 steps/s, loss 0.7562, memory up to 3.0 GiB, waiting 0% to 60%"
    )
