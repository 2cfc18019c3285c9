from __future__ import annotations

import signal

import pytest

from accelerate_cpp.launch.failure import WorkerEnd, WorkerFailed, describe, first_failure, shell_status


def _nobody_lost_a_peer(rank: int) -> bool:
    return False


def test_run_without_failures_names_none() -> None:
    assert first_failure([WorkerEnd(1, 0, False), WorkerEnd(0, 0, False)], _nobody_lost_a_peer) is None


def test_earliest_failure_is_the_first() -> None:
    ends = [WorkerEnd(2, 0, False), WorkerEnd(1, 7, False), WorkerEnd(0, 1, False)]
    assert first_failure(ends, _nobody_lost_a_peer) == WorkerEnd(1, 7, False)


def test_survivor_that_lost_a_peer_is_not_named_though_it_ended_earlier() -> None:
    ends = [WorkerEnd(0, 1, False), WorkerEnd(1, -9, False)]
    assert first_failure(ends, lambda rank: rank == 0) == WorkerEnd(1, -9, False)


def test_worker_ended_by_the_launcher_is_not_named_before_one_that_failed() -> None:
    ends = [WorkerEnd(0, 1, False), WorkerEnd(1, -15, True)]
    assert first_failure(ends, lambda rank: rank == 0) == WorkerEnd(0, 1, False)


def test_worker_ended_by_the_launcher_is_named_when_there_is_no_other() -> None:
    assert first_failure([WorkerEnd(1, -15, True)], _nobody_lost_a_peer) == WorkerEnd(1, -15, True)


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
