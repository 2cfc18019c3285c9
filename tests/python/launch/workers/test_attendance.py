from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from accelerate_cpp.comm.joining import BEGINS, GAVE_UP, JOINED, MESSAGE
from accelerate_cpp.config import env_table
from accelerate_cpp.launch.workers.attendance import Absence, Attendance, attendance


@pytest.fixture
def present() -> Iterator[Attendance]:
    with attendance() as made:
        for worker in range(3):
            made.variables(worker)
        yield made


def _say(present: Attendance, *messages: tuple[int, int]) -> None:
    for worker, event in messages:
        os.write(present.descriptor, MESSAGE.pack(worker, event))
    present.read()


def test_workers_are_told_the_pipe_and_their_number(present: Attendance) -> None:
    place = env_table.JOINING.get(present.variables(5))
    assert place == (present.descriptor, os.fstat(present.incoming).st_ino, 5)


def test_nobody_is_waited_for_where_nobody_joins(present: Attendance) -> None:
    assert present.absence([0, 1]) is None


def test_worker_that_ended_before_it_joined_is_absent(present: Attendance) -> None:
    _say(present, (0, BEGINS), (2, BEGINS))
    assert present.absence([]) is None
    assert present.absence([1]) == Absence(1, [0, 2])


def test_what_a_program_writes_there_by_mistake_is_no_announcement(present: Attendance) -> None:
    _say(present, (7, BEGINS), (0, BEGINS))
    assert present.absence([1]) == Absence(1, [0])
    os.write(present.descriptor, MESSAGE.pack(2, BEGINS)[:3])
    present.read()
    os.write(present.descriptor, MESSAGE.pack(2, BEGINS)[3:])
    present.read()
    assert present.absence([1]) == Absence(1, [0, 2])


def test_worker_that_joined_is_not(present: Attendance) -> None:
    _say(present, (0, BEGINS), (1, BEGINS), (1, JOINED))
    assert present.absence([1]) is None


def test_second_group_needs_all_again(present: Attendance) -> None:
    _say(present, (0, BEGINS), (1, BEGINS), (1, JOINED), (0, JOINED))
    assert present.absence([1]) is None
    _say(present, (0, BEGINS))
    assert present.absence([1]) == Absence(1, [0])


def test_worker_that_gave_up_or_ended_does_not_wait(present: Attendance) -> None:
    _say(present, (0, BEGINS), (2, BEGINS), (2, GAVE_UP))
    assert present.absence([0, 1]) is None


def test_pipe_is_closed_on_leaving() -> None:
    with attendance() as made:
        pass
    for descriptor in (made.descriptor, made.incoming):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
