from __future__ import annotations

import ctypes
import errno
import faulthandler
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from accelerate_cpp.config import env_table
from accelerate_cpp.errors import PeerLost
from accelerate_cpp.launch.fork import forked, forked_child
from accelerate_cpp.launch.fork.forked import Parent, Supervision, run_forked
from accelerate_cpp.launch.fork.forked_plan import function_group
from accelerate_cpp.launch.fork.results import result_files, values_of
from accelerate_cpp.launch.view.notebook_cells import FunctionFailed
from accelerate_cpp.launch.workers import news, supervisor
from accelerate_cpp.launch.workers.failure import WorkerFailed
from accelerate_cpp.runtime.progress_board import open_slot


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True)
def patience_of_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(supervisor, "REPORT_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    descriptors = set(os.listdir("/proc/self/fd"))
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert set(os.listdir("/proc/self/fd")) == descriptors


def _rank() -> int:
    return int(os.environ["RANK"])


def _run(
    task: Callable[[], object], num_processes: int = 2, parent: Parent | None = None, max_restarts: int = 0
) -> list[Any] | None:
    with result_files(num_processes) as results:
        group = function_group(num_processes, cpu=True)
        run_forked(task, group, results, parent, Supervision(max_restarts))
        return values_of(results)


def _rank_1(does: Callable[[], object]) -> Callable[[], object]:
    """A task in which rank 1 calls ``does`` and the others wait for ever."""
    return lambda: does() if _rank() == 1 else threading.Event().wait()


def _segfault() -> None:
    faulthandler.disable()  # the test runner enables it
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise(error: BaseException) -> None:
    raise error


def test_every_rank_runs_and_its_output_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    _run(lambda: print(_rank(), os.environ["WORLD_SIZE"], os.environ["FORK_LAUNCHED"]), 3)
    assert sorted(capsys.readouterr().out.splitlines()) == ["0 3 true", "1 3 true", "2 3 true"]


def test_what_each_rank_returns_comes_back() -> None:
    assert _run(_rank, 3) == [0, 1, 2]
    assert _run(lambda: None) is None


def test_threads_that_a_function_starts_may_finish(tmp_path: Path) -> None:
    def task() -> None:
        def write() -> None:
            time.sleep(0.3)  # the function has returned by then
            (tmp_path / str(_rank())).touch()

        pool = ThreadPoolExecutor(1)
        pool.submit(int).result()  # and one of its threads waits for work
        threading.Thread(target=write).start()

    _run(task)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_launch_does_not_wait_for_a_thread_that_reads() -> None:
    """As ``input()`` does; it holds the lock of its stream of the C library."""
    libc, (nothing, end) = ctypes.CDLL(None), os.pipe()
    libc.fdopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fdopen(nothing, b"r"))
    reader = threading.Thread(target=lambda: libc.fgetc(stream))
    reader.start()
    try:
        assert _run(_rank) == [0, 1]
    finally:
        os.close(end)
        reader.join()
        libc.fclose(stream)


def test_threads_of_threads_may_finish(tmp_path: Path) -> None:
    def first() -> None:
        time.sleep(0.3)
        threading.Thread(target=second).start()

    def second() -> None:
        time.sleep(0.3)
        (tmp_path / str(_rank())).touch()

    _run(lambda: threading.Thread(target=first).start())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_pool_that_a_function_leaves_to_the_end_is_ended() -> None:
    pools: list[Any] = []

    def task() -> None:
        for kind in (ThreadPoolExecutor, ProcessPoolExecutor):
            pools.append(kind(1))
            pools[-1].submit(os.getpid).result()

    _run(task)


def test_what_c_code_holds_back_arrives_once(capfd: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    libc.printf(b"of the parent\n")
    out: list[str] = []
    _run(lambda: libc.printf(b"of a worker\n"), 2, Parent(print_stdout=out.append))
    libc.fflush(None)
    assert "".join(out) == "of a worker\n" * 2
    assert capfd.readouterr().out == "of the parent\n"


def _use_up_descriptors(spare: int) -> list[int]:
    """Opens descriptors until only so many are left, and returns them."""
    held = []
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(spare):
        os.close(held.pop())
    return held


def test_nothing_is_left_wherever_descriptors_run_out() -> None:
    usual, outcomes, before = resource.getrlimit(resource.RLIMIT_NOFILE), list[str](), os.listdir("/proc/self/fd")
    for spare in range(100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 100, usual[1]))
        held = _use_up_descriptors(spare)
        try:
            _run(lambda: None)
            outcomes.append("ended well")
        except OSError as error:
            outcomes.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        assert outcomes[-1] == "ended well" or "Too many open files" in outcomes[-1]
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        for descriptor in held:
            os.close(descriptor)
        assert os.listdir("/proc/self/fd") == before
        if outcomes[-1] == "ended well":
            break
    assert outcomes[-1] == "ended well"
    assert len(outcomes) > 20


def test_large_values_come_back_from_all_ranks() -> None:
    values = _run(lambda: b"x" * 50_000_000)
    assert values is not None
    assert list(map(len, values)) == [50_000_000] * 2


def test_parent_says_where_output_goes_and_what_workers_find(capsys: pytest.CaptureFixture[str]) -> None:
    out: list[str] = []
    read_end, write_end = os.pipe()

    def task() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(write_end)
        print(os.environ["ONLY_THIS"], "HOME" in os.environ)

    environment = {"ONLY_THIS": "there"}
    _run(task, 1, Parent(environment, print_stdout=out.append, private=(write_end,)))
    assert ("".join(out), capsys.readouterr().out) == ("there False\n", "")
    os.close(read_end)
    os.close(write_end)


def test_interrupt_may_come_over_a_socket() -> None:
    interrupts, signals = socket.socketpair()
    signals.setblocking(False)
    interrupts.send(bytes([signal.SIGINT]))
    with interrupts, signals, pytest.raises(KeyboardInterrupt):
        _run(threading.Event().wait, 1, Parent(signals=signals))


def test_output_arrives_while_the_worker_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()

    class Answering:
        def write(self, text: str) -> None:
            os.write(write_end, b"seen")

        def flush(self) -> None:
            pass

    def task() -> None:
        print("half way")
        assert os.read(read_end, 4) == b"seen"  # comes only if the parent saw the line while this worker waits

    monkeypatch.setattr("sys.stdout", Answering())
    _run(task, 1)
    os.close(read_end)
    os.close(write_end)


def test_exception_of_a_worker_is_raised_with_its_traceback() -> None:
    with pytest.raises(WorkerFailed, match=r"(?s)^rank 1 failed: ValueError: boom\n\nTraceback .*in _raise") as failure:
        _run(_rank_1(partial(_raise, ValueError("boom"))))
    assert failure.value.rank == 1
    assert isinstance(failure.value, RuntimeError)


def test_error_is_told_while_others_still_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ends only when its error has been told."""
    monkeypatch.setattr(news, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(forked_child, "_part_from_others", lambda error: (tmp_path / "told").open().close())
    os.mkfifo(tmp_path / "told")
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        (tmp_path / "told").open("w").close()

    def boom() -> None:
        if _rank() == 0:
            os._exit(0)
        raise ValueError("boom")

    with pytest.raises(FunctionFailed, match="rank 1 failed: ValueError: boom"):
        _run(boom, parent=Parent(print_stderr=tell))
    assert told == ["rank 1 failed: ValueError: boom; the processes are ending\n"]


def test_long_traceback_arrives_whole() -> None:
    message = "x" * 500_000
    with pytest.raises(WorkerFailed) as failure:
        _run(_rank_1(partial(_raise, ValueError(message))))
    assert str(failure.value).count("x" * 1000) >= 500


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (partial(os._exit, 7), "rank 1 failed: exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"rank 1 failed: killed by SIGKILL \(signal 9\)"),
        (_segfault, r"rank 1 failed: killed by SIGSEGV \(signal 11\)"),
    ],
)
def test_death_of_a_worker_is_raised(does: Callable[[], object], words: str) -> None:
    with pytest.raises(WorkerFailed, match=rf"^{words}$"):
        _run(_rank_1(does))


def test_worker_that_lost_a_peer_is_not_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "REPORT_SECONDS", 60.0)

    def task() -> None:
        if _rank() == 0:
            raise PeerLost("rank 1 died")
        os._exit(7)

    words = r"(?s)^rank 1 failed: exit code 7\n\nrank 0 waited for it:\n\nTraceback .*in task\n.*PeerLost: rank 1 died"
    with pytest.raises(WorkerFailed, match=words):
        _run(task)


def test_what_a_failed_attempt_returned_is_forgotten(tmp_path: Path) -> None:
    def work() -> bytes | None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            return b"short" if _rank() == 0 else None
        if _rank() == 0:
            (tmp_path / "returns").touch()
            return bytes(100_000)
        while not (tmp_path / "returns").exists():
            pass
        raise ValueError

    assert _run(work, max_restarts=1) == [b"short", None]


def test_last_failure_is_raised_and_an_interrupt_ends_the_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError(os.environ["TORCHELASTIC_RESTART_COUNT"])

    with pytest.raises(FunctionFailed, match="ValueError: 2"):
        _run(fail, max_restarts=2)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(KeyboardInterrupt):
        theirs.send(bytes([signal.SIGINT]))
        _run(threading.Event().wait, parent=Parent(signals=ours), max_restarts=10_000)


def test_interrupt_after_a_failure_raises_the_failure(tmp_path: Path) -> None:
    parent = os.getpid()
    os.mkfifo(tmp_path / "ready")

    def task() -> None:
        if _rank() == 1:
            (tmp_path / "ready").open().close()
            raise ValueError("boom")
        signal.signal(signal.SIGTERM, lambda *_: os.kill(parent, signal.SIGINT))
        (tmp_path / "ready").open("w").close()
        while True:
            signal.pause()

    told: list[str] = []
    with pytest.raises(FunctionFailed, match="rank 1 failed: ValueError: boom"):
        _run(task, parent=Parent(print_stderr=told.append), max_restarts=5)
    assert "starting all again" not in "".join(told)


def test_interrupt_ends_the_workers_after_their_clean_up(capsys: pytest.CaptureFixture[str]) -> None:
    parent = os.getpid()

    def task() -> None:
        try:
            if _rank() == 1:
                os.kill(parent, signal.SIGINT)
            threading.Event().wait()
        finally:
            print("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        _run(task)
    assert "cleaned up" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_function_runs_in_the_main_thread_of_its_process() -> None:
    _run(lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN))  # only the main thread may


def test_launch_from_another_thread_works(capsys: pytest.CaptureFixture[str]) -> None:
    thread = threading.Thread(target=_run, args=(lambda: print("ran"),))
    thread.start()
    thread.join()
    assert capsys.readouterr().out == "ran\nran\n"


def test_refused_fork_is_raised_and_ends_the_workers_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = os.fork
    forks = iter(range(9))

    def second_is_refused() -> int:
        if next(forks) == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", second_is_refused)
    with pytest.raises(BlockingIOError):
        _run(threading.Event().wait)


def _step() -> None:
    place = env_table.BOARD.get()
    slot = None if place is None else open_slot(place, 1)
    assert slot is not None
    slot.add_step(1, 0)


def test_display_shows_how_far_each_worker_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "CELL_DELAY_SECONDS", 0.0)
    shown: list[tuple[str, str]] = []
    _run(_step, parent=Parent(display=lambda *both: shown.append(both)))
    text, page = shown[-1]
    assert [line.split()[:2] for line in text.splitlines()[:3]] == [["rank", "step"], ["0", "1"], ["1", "1"]]
    assert page.startswith("<table>")


def test_without_a_display_workers_have_no_board() -> None:
    assert _run(env_table.BOARD.is_set) == [False, False]
