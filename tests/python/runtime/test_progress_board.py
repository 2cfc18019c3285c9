from __future__ import annotations

import math
import os
import tempfile

import pytest

from accelerate_cpp.runtime.progress_board import Board, Slot, Standing, board, open_slot

SECOND = 1_000_000_000


def slot_of(watched: Board, number: int, began_ns: int = 1) -> Slot:
    slot = open_slot((watched.descriptor, number), began_ns)
    assert slot is not None
    return slot


def test_worker_that_has_not_begun_is_unknown() -> None:
    with board(range(4, 6)) as watched:
        first, second = watched.look()
    assert (first.rank, second.rank) == (4, 5)
    assert (first.steps, first.last_ns, first.steps_per_second, first.share_waited) == (0, 0, 0.0, 0.0)
    assert math.isnan(first.loss)


def test_what_a_worker_writes_is_read_of_its_slot_alone() -> None:
    with board(range(2)) as watched:
        slot = slot_of(watched, 1, began_ns=5)
        assert watched.look()[1].last_ns == 5
        slot.add_step(2 * SECOND, SECOND)
        slot.add_step(4 * SECOND, 2 * SECOND)
        slot.add_step(5 * SECOND, 2 * SECOND)
        slot.set_loss(0.5)
        slot.set_memory(1000, 2000)
        other, standing = watched.look()
    assert other.steps == 0
    expected = Standing(1, 3, 0.5, 1000, 2000, 5 * SECOND, [2.0, 1.0], [1.0, 0.0], has_waited=True, pid=os.getpid())
    assert standing == expected
    assert standing.own_seconds == [1.0, 1.0]
    assert standing.steps_per_second == pytest.approx(2 / 3)
    assert standing.share_waited == pytest.approx(1 / 3)


def test_position_in_a_pass_is_read_with_its_time_left_where_its_length_is_known() -> None:
    with board(range(1)) as watched:
        slot = slot_of(watched, 0)
        for read, batches, left_ns, seconds in ((3, 8, 5 * SECOND, 5.0), (1, 8, -1, None), (4, 0, -1, None)):
            slot.set_pass(read, batches, left_ns)
            [standing] = watched.look()
            assert (standing.batches_read, standing.batches, standing.seconds_left) == (read, batches, seconds)


@pytest.mark.parametrize("steps", [9, 10, 11, 12, 16, 17, 100])
def test_only_the_last_ten_steps_are_kept(steps: int) -> None:
    with board(range(1)) as watched:
        slot = slot_of(watched, 0)
        for step in range(1, steps + 1):
            slot.add_step(step * step * SECOND, 0)
        [standing] = watched.look()
    assert standing.steps == steps
    kept = range(max(2, steps - 9), steps + 1)
    assert standing.step_seconds == [2 * step - 1 for step in kept]
    assert not standing.has_waited


def test_session_that_is_built_again_counts_on() -> None:
    with board(range(1)) as watched:
        slot_of(watched, 0, began_ns=1).add_step(SECOND, 0)
        slot_of(watched, 0, began_ns=7).add_step(2 * SECOND, 0)
        [standing] = watched.look()
    assert (standing.steps, standing.step_seconds) == (2, [1.0])


def test_descriptor_of_something_else_is_no_board() -> None:
    with tempfile.TemporaryFile() as file:
        assert open_slot((file.fileno(), 0), 1) is None
        unused = os.dup(file.fileno())
    os.close(unused)
    assert open_slot((unused, 0), 1) is None


def test_nothing_is_left_of_a_board() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with board(range(3)):
        pass
    assert set(os.listdir("/proc/self/fd")) == before
