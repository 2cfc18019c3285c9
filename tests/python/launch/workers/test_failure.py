from __future__ import annotations

import signal

import pytest

from accelerate_cpp.launch.workers.attendance import Absence
from accelerate_cpp.launch.workers.failure import (
    RunEnd,
    WorkerEnd,
    WorkerFailed,
    account,
    describe,
    failed_status,
    first_failure,
    shell_status,
)


def _first(ends: list[WorkerEnd], blames: dict[int, list[int]], absence: Absence | None = None) -> WorkerEnd | None:
    return first_failure(RunEnd(tuple(ends), None, absence), blames.get)


def test_run_without_failures_names_none() -> None:
    assert _first([WorkerEnd(1, 0, False), WorkerEnd(0, 0, False)], {}) is None


def test_earliest_failure_is_the_first() -> None:
    ends = [WorkerEnd(2, 0, False), WorkerEnd(1, 7, False), WorkerEnd(0, 1, False)]
    assert _first(ends, {}) == WorkerEnd(1, 7, False)


def test_survivor_that_blames_another_is_not_named_though_it_ended_earlier() -> None:
    ends = [WorkerEnd(0, 1, False), WorkerEnd(1, -9, False)]
    assert _first(ends, {0: [1]}) == WorkerEnd(1, -9, False)


def test_worker_ended_by_the_launcher_is_not_named_before_one_that_failed() -> None:
    ends = [WorkerEnd(0, 1, False), WorkerEnd(1, -15, True)]
    assert _first(ends, {}) == WorkerEnd(0, 1, False)
    assert _first(ends, {0: []}) == WorkerEnd(0, 1, False)


@pytest.mark.parametrize(("stopped", "state"), [((1, 2), "was stopped by a signal or a debugger"), ((), "still ran")])
def test_worker_for_which_others_waited_in_vain_is_named_though_the_launcher_ended_it(
    stopped: tuple[int, ...], state: str
) -> None:
    waited, silent = [WorkerEnd(0, 1, False), WorkerEnd(3, 1, False)], WorkerEnd(1, -9, True)
    run = RunEnd((*waited, WorkerEnd(2, -15, True), silent), None, stopped=stopped)
    assert first_failure(run, {0: [0, 1], 3: [0, 1]}.get) == silent
    assert account(silent, run) == f"did not answer: it {state} when others had waited for it in vain"
    assert failed_status(silent) == 1


def test_stopped_worker_is_named_before_another_that_did_not_answer() -> None:
    ends = (WorkerEnd(0, 1, False), WorkerEnd(1, -15, True), WorkerEnd(2, -9, True))
    assert first_failure(RunEnd(ends, None, stopped=[2]), {0: [1, 2]}.get) == ends[2]


def test_worker_is_named_whose_error_blames_a_rank_of_another_machine() -> None:
    ends = [WorkerEnd(1, 1, False), WorkerEnd(0, 1, False)]
    assert _first(ends, {0: [0, 3], 1: [0, 1]}) == ends[1]


def test_worker_ended_by_the_launcher_is_named_when_there_is_no_other() -> None:
    assert _first([WorkerEnd(1, -15, True)], {}) == WorkerEnd(1, -15, True)


@pytest.mark.parametrize("blamed", [[2], []])
def test_worker_that_left_is_named_before_those_that_blame_it_or_nobody_by_name(blamed: list[int]) -> None:
    ends = [WorkerEnd(2, 0, False), WorkerEnd(0, 1, False), WorkerEnd(1, 0, True)]
    assert _first(ends, {0: blamed}) == WorkerEnd(2, 0, False)


@pytest.mark.parametrize("blames", [{}, {0: [1]}])
def test_worker_that_ended_well_is_not_named_for_the_failure_of_others(blames: dict[int, list[int]]) -> None:
    ends = [WorkerEnd(2, 0, False), WorkerEnd(0, 1, False)]
    assert _first(ends, blames) == WorkerEnd(0, 1, False)


def test_worker_that_did_not_join_is_named_and_how_it_is_said() -> None:
    ends, absence = [WorkerEnd(2, 0, False), WorkerEnd(0, -15, True), WorkerEnd(1, -15, True)], Absence(2, [0, 1])
    assert _first(ends, {}, absence) == WorkerEnd(2, 0, False)
    assert account(ends[0], RunEnd(tuple(ends), None, absence)) == (
        "left first: it ended with exit code 0 before it joined the process group, where ranks 0-1 waited for it"
    )
    assert account(ends[0], RunEnd(tuple(ends), None, absence), first_rank=4).endswith("where ranks 4-5 waited for it")


def test_status_of_a_failed_launch_is_never_0() -> None:
    assert failed_status(WorkerEnd(1, 0, False)) == 1
    assert failed_status(WorkerEnd(1, 7, False)) == 7
    assert failed_status(WorkerEnd(1, -9, False)) == 137


@pytest.mark.parametrize(
    ("exit_code", "text", "status"),
    [
        (7, "exit code 7", 7),
        (-signal.SIGKILL, "killed by SIGKILL (signal 9)", 137),
        (-signal.SIGSEGV, "killed by SIGSEGV (signal 11)", 139),
        (-40, "killed by signal 40", 168),
    ],
)
def test_exit_codes_are_described_and_passed_on_as_a_shell_would(exit_code: int, text: str, status: int) -> None:
    assert describe(exit_code) == text
    assert shell_status(exit_code) == status


def test_failure_carries_the_rank_and_is_a_runtime_error() -> None:
    error = WorkerFailed("rank 3 failed", rank=3, exit_code=-9)
    assert isinstance(error, RuntimeError)
    assert (error.rank, error.exit_code, str(error)) == (3, -9, "rank 3 failed")


def test_a_worker_that_has_saved_and_left_is_not_what_failed() -> None:
    saved, crashed = WorkerEnd(0, 75, False), WorkerEnd(1, -11, False)
    assert first_failure(RunEnd((saved, crashed), None, savers={0, 1}), lambda rank: None) == crashed
    assert first_failure(RunEnd((saved, crashed), None), lambda rank: None) == saved
