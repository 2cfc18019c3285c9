from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from accelerate_cpp.errors import AccelerateError, InvalidArgument
from accelerate_cpp.launch.fork import fork_server
from accelerate_cpp.launch.fork.fork_server import run_in_fork_server
from accelerate_cpp.launch.fork.fork_server_main import VIEW
from accelerate_cpp.launch.fork.forked_plan import function_group
from accelerate_cpp.launch.fork.results import result_files, values_of


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, sys.path)))
    descriptors, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    for server in fork_server._servers.values():
        server.end()
    signal.signal(signal.SIGINT, previous)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def _run(task: Callable[..., Any], preload: tuple[str, ...] = ()) -> list[Any] | None:
    with result_files(2) as results:
        run_in_fork_server(task, (task, ()), function_group(2, cpu=True), results, preload)
        return values_of(results)


def _parent_of_workers() -> int:
    parents = _run(os.getppid)
    assert parents is not None
    assert parents[0] == parents[1]
    return int(parents[0])


def test_workers_are_forks_of_one_process_that_serves_all_calls() -> None:
    first = _parent_of_workers()
    assert first != os.getpid()
    assert _parent_of_workers() == first


def test_output_arrives_in_the_streams_of_this_process(capsys: pytest.CaptureFixture[str]) -> None:
    _run(lambda: (print("hello"), print("oh", file=sys.stderr)))
    assert capsys.readouterr() == ("hello\n" * 2, "oh\n" * 2)


def test_failure_of_a_worker_is_raised_and_the_server_lives() -> None:
    server = _parent_of_workers()
    with pytest.raises(RuntimeError, match=r"rank \d failed: ZeroDivisionError"):
        _run(lambda: 1 // 0)
    assert _parent_of_workers() == server


def test_dead_server_is_told_and_replaced_at_the_next_call() -> None:
    server = _parent_of_workers()
    message = rf"helper process {server}, .* died: killed by SIGKILL \(signal 9\).* next call .* starts a new one"
    with pytest.raises(AccelerateError, match=message):
        _run(lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)))
    assert _parent_of_workers() != server


def test_server_that_died_between_calls_is_replaced_silently() -> None:
    server = _parent_of_workers()
    os.kill(server, signal.SIGKILL)
    fork_server._servers[os.getpid()]._thread.join()
    assert _parent_of_workers() != server


def test_server_that_cannot_start_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AccelerateError, match="died: exit code 1"):
        _run(os.getppid, preload=("no_such_module",))
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_interrupt_ends_the_run_and_not_the_server() -> None:
    server, kernel = _parent_of_workers(), os.getpid()
    with pytest.raises(KeyboardInterrupt):
        _run(lambda: (os.kill(kernel, signal.SIGINT), time.sleep(600)))
    assert _parent_of_workers() == server


def test_interrupt_while_the_server_starts_ends_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "interrupting.py").write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(KeyboardInterrupt):
        _run(os.getppid, preload=("interrupting",))


def test_stream_that_raises_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError("no space left")

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="no space left"):
        _run(lambda: (print("hello"), time.sleep(600)))


def test_call_from_another_thread_works_and_its_end_leaves_the_server() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(_parent_of_workers()))
    thread.start()
    thread.join()
    assert found == [_parent_of_workers()]


def test_what_cannot_be_shipped_is_refused_before_anything_starts() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidArgument, match="`lock`, which it uses"):
        _run(lambda: lock)
    assert all(not server.lives for server in fork_server._servers.values())


def test_view_of_the_server_is_displayed_here() -> None:
    _parent_of_workers()
    shown: list[tuple[str, str]] = []
    server = fork_server._servers[os.getpid()]
    server._take(VIEW + b'["text", "page"]', lambda *both: shown.append(both))
    server._take(VIEW + b'["text", "page"]', None)
    assert shown == [("text", "page")]
