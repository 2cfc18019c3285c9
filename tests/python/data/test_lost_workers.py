"""Errors of connections to processes of a data loader, and which process they come from."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from accelerate_cpp.data import lost_workers
from accelerate_cpp.data.lost_workers import Read


def wait_and_end(incoming: Connection, exit_code: int) -> None:
    incoming.recv()
    raise SystemExit(exit_code)


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    """Two processes, each with a function that lets it end, with the exit codes 0 and 3."""
    context = multiprocessing.get_context("fork")  # a spawned one starts a tracker, which stays
    started = []
    for exit_code in (0, 3):
        incoming, outgoing = context.Pipe(duplex=False)
        process = context.Process(target=wait_and_end, args=(incoming, exit_code))
        process.start()
        started.append((process, outgoing))
    yield started
    for process, _ in started:
        process.kill()
        process.join()


def breaking(error: Exception, ending: list[tuple[Any, Connection]]) -> Iterator[int]:
    """A batch, and then what torch's iterator meets when these processes end."""
    yield 1
    for _, outgoing in ending:
        outgoing.send(None)
    raise error


def read(workers: list[Any], ending: list[int], error: Exception, status: list[bool] | None = None) -> Read:
    iterator = SimpleNamespace(_workers=[process for process, _ in workers], _workers_status=status or [True, True])
    return Read(breaking(error, [workers[one] for one in ending]), iterator)


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "reset by peer"), EOFError(), FileNotFoundError(2, "gone")]
)
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_ends_is_named_with_its_exit_code(
    workers: list[Any], error: Exception, worker: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_workers, "WAIT_SECONDS", 120.0)
    batches = read(workers, [worker], error)
    assert next(batches) == 1
    pid, exit_code = workers[worker][0].pid, (0, 3)[worker]
    with pytest.raises(
        RuntimeError, match=rf"DataLoader worker \(pid\(s\) {pid}\) exited .*exit code {exit_code}$"
    ) as told:
        next(batches)
    assert told.value.__cause__ is error


def test_an_error_of_the_data_stays_as_it_is(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_workers, "WAIT_SECONDS", 0.0)
    error = FileNotFoundError(2, "no such image")
    batches = read(workers, [], error)
    assert next(batches) == 1
    with pytest.raises(FileNotFoundError) as raised:
        next(batches)
    assert raised.value is error


def test_a_worker_that_has_read_all_its_samples_is_not_lost(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_workers, "WAIT_SECONDS", 0.0)
    workers[0][1].send(None)
    workers[0][0].join()
    batches = read(workers, [], EOFError(), status=[False, True])
    assert next(batches) == 1
    with pytest.raises(EOFError):
        next(batches)


def test_a_loader_of_another_kind_has_no_workers() -> None:
    batches = Read(breaking(EOFError("of its own"), []), object())
    assert next(batches) == 1
    with pytest.raises(EOFError, match="of its own"):
        next(batches)


def test_an_error_that_a_worker_has_handed_over_is_raised_at_once(
    workers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "wait", lambda *args: pytest.fail("waited"))
    error = FileNotFoundError("Caught FileNotFoundError in DataLoader worker process 0.\nno such image")
    for batches in (read(workers, [], error), Read(breaking(EOFError(), []), SimpleNamespace(_workers=[]))):
        assert next(batches) == 1
        with pytest.raises((FileNotFoundError, EOFError)):
            next(batches)
