"""Processes of tests: one that a zygote forks cannot be told from an interpreter of its own, except by its modules."""

from __future__ import annotations

import atexit
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from processes import environment_of, running, start_processes
from processes import run_processes as run
from rank_process import may_be_forked

STARTS = pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])
PATIENCE_SECONDS = 240.0


def await_true(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_ended(*pids: int) -> None:
    """Returns when none of the processes is left; one that nobody waits for may stay behind as a zombie."""

    def lives(pid: int) -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
        return False

    await_true(lambda: not any(map(lives, pids)))


def raise_error() -> None:
    raise ValueError("the batch is bad")


def raise_keyboard_interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def exit_with(code: object) -> None:
    raise SystemExit(code)


def end_at_once() -> None:
    print("this is not flushed", end="")
    os._exit(7)


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)


@STARTS
@pytest.mark.parametrize(
    ("function", "arguments", "code", "last_line"),
    [
        (raise_error, (), 1, "ValueError: the batch is bad"),
        (raise_keyboard_interrupt, (), -signal.SIGINT, "KeyboardInterrupt"),
        (exit_with, (None,), 0, ""),
        (exit_with, (3,), 3, ""),
        (exit_with, ("enough",), 1, "enough"),
        (end_at_once, (), 7, ""),
        (end_by, (signal.SIGKILL,), -signal.SIGKILL, ""),
        (end_by, (signal.SIGTERM,), -signal.SIGTERM, ""),
        (end_by, (signal.SIGINT,), -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_exit_codes(function: Callable[..., None], arguments: Any, code: int, last_line: str, fresh: bool) -> None:
    [outcome] = start_processes(function, 1, *arguments, fresh=fresh)
    assert (outcome.exit_code, outcome.value) == (code, None), outcome.stderr
    assert (outcome.stderr.splitlines() or [""])[-1] == last_line
    assert ("Traceback" in outcome.stderr) == (last_line[-1:] in ("d", "t"))


def leave_later(text: str) -> str:
    """Returns at once; a thread and a handler go on."""

    def write_late() -> None:
        time.sleep(0.3)
        print("of a thread", text)

    atexit.register(print, "of a handler")
    threading.Thread(target=write_late).start()
    print("of the function", repr(sys.stdin.read()), file=sys.stderr)
    return text


@pytest.mark.parametrize("how", [{}, {"finalize": True}, {"fresh": True}], ids=["forked", "finalized", "fresh"])
def test_streams_and_values_are_complete_when_threads_and_handlers_have_ended(how: dict[str, bool]) -> None:
    for outcome in start_processes(leave_later, 2, "ä", **how):
        assert (outcome.exit_code, outcome.value) == (0, "ä"), outcome.stderr
        assert outcome.stdout == "of a thread ä\nof a handler\n"
        assert outcome.stderr == "of the function ''\n"


def what_the_process_is() -> dict[str, Any]:
    """What an interpreter has at its start, as far as it is the same each time."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    script = sys.modules["__main__"]
    return {
        "handlers": {number: getattr(handler, "__name__", handler) for number, handler in handlers.items()},
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "wakes": signal.set_wakeup_fd(-1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": len(os.listdir("/proc/self/task")),
        "threads": [thread.name for thread in threading.enumerate()],
        "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
        "children": psutil.Process().children(),
        "folder": os.getcwd(),
        "environment": {name: text for name, text in os.environ.items() if name != "MASTER_PORT"},
        "arguments": [sys.argv[0], *sys.argv[2:3], len(sys.argv)],
        "search path": sys.path,
        "script": {name for name in vars(script) if name[:2] != "__"} | {hasattr(script, "__file__")},
        "umask": os.umask(0o22),
        "streams": [stream.encoding for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "flags": list(sys.flags),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux, and looked at in /proc")
def test_a_fork_is_what_an_interpreter_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("ACCELERATE_CPP_TEST_KEPT", "of the test")
    monkeypatch.delenv("PATH")
    extra = {"ACCELERATE_CPP_TEST_EXTRA": "=", "WORLD_SIZE": ""}
    forked = run(what_the_process_is, 2, environment=extra)
    assert forked == run(what_the_process_is, 2, environment=extra, fresh=True)
    expected = {**environment_of(1, 2, 0, extra)}
    del expected["MASTER_PORT"]
    assert forked[1]["environment"] == expected
    assert forked[1]["folder"] == str(tmp_path)


def draw() -> list[Any]:
    import numpy
    import torch

    return [random.random(), numpy.random.rand(), torch.rand(1).item(), hash("a"), torch.get_num_threads()]


def test_no_two_processes_draw_the_same_numbers() -> None:
    draws = [run(draw, 3) for _ in range(2)]
    for generator in range(3):
        assert len({values[generator] for values in (*draws[0], *draws[1])}) == 6
    hashes = [values[3] for values in draws[0]]
    assert hashes[0] != hashes[1] != hashes[2], "ranks in sequence agree about the order of their sets"
    assert {values[4] for values in (*draws[0], *draws[1])} == {1}


def loaded() -> bool:
    return "torch" in sys.modules


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_forks_have_torch_and_interpreters_have_nothing() -> None:
    assert run(loaded, 1) == [True]
    assert run(loaded, 1, fresh=True) == [False]
    assert run(loaded, 1, environment={"OMP_NUM_THREADS": "2"}) == [False]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize(
    ("name", "forked"),
    [(name, True) for name in ("ACCELERATE_DEBUG_MODE", "MASTER_ADDR", "TORCHINDUCTOR_CACHE_DIR")]
    + [(name, False) for name in ("OMP_NUM_THREADS", "TORCH_LOGS", "PYTHONMALLOC", "LD_PRELOAD", "LC_ALL")]
    + [(name, False) for name in ("CUDA_VISIBLE_DEVICES", "MKL_CBWR")],
)
def test_variables_that_count_at_the_start_take_an_interpreter(name: str, forked: bool) -> None:
    assert may_be_forked(environment_of(0, 1, 1, {}))
    assert may_be_forked(environment_of(0, 1, 1, {name: "something else"})) == forked


def stay(folder: str) -> None:
    """Never ends, and has a child that does not either."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = os.fork()
    if child:
        Path(folder, os.environ["RANK"]).write_text(f"{os.getpid()} {child} {os.getppid()}")
    while True:
        signal.pause()


@STARTS
def test_processes_are_killed_when_it_is_time(tmp_path: Path, fresh: bool) -> None:
    begin = time.monotonic()
    outcomes = start_processes(stay, 2, str(tmp_path), timeout=1, fresh=fresh)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    assert time.monotonic() - begin >= 1


def processes_that_stay(folder: Path) -> list[int]:
    """The processes of two ranks that are in :func:`stay`, once they have said so: themselves, children, parents."""
    files = [folder / rank for rank in ("0", "1")]
    await_true(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


@STARTS
def test_nothing_outlives_the_block(tmp_path: Path, fresh: bool) -> None:
    with running(stay, 2, str(tmp_path), fresh=fresh) as job:
        first, its_child, _, second, its_child_too, _ = processes_that_stay(tmp_path)
        assert [process.pid for process in job.processes] == [first, second]
        assert [process.poll() for process in job.processes] == [None, None]
    await_ended(first, its_child, second, its_child_too)


def leave_a_child(folder: str) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    Path(folder, "child").write_text(str(child))


@STARTS
def test_nothing_outlives_a_process_that_ends_by_itself(tmp_path: Path, fresh: bool) -> None:
    run(leave_a_child, 1, str(tmp_path), fresh=fresh)
    await_ended(int((tmp_path / "child").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_zygotes_and_their_forks_end_with_a_killed_test(tmp_path: Path) -> None:
    starts = "from test_processes import *; start_processes(stay, 2, sys.argv[1])"
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; {starts}", str(tmp_path)]
    process = subprocess.Popen(command)
    try:
        pids = processes_that_stay(tmp_path)
    finally:
        process.kill()
        process.wait()
    assert len(set(pids)) == 6
    await_ended(*pids)
