from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_cpp.config.env_table import render_cores
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch import executed, supervisor
from accelerate_cpp.launch.environment import WorkerGroup
from accelerate_cpp.launch.executed import execute
from accelerate_cpp.launch.plan import LaunchPlan


def _plan(code: str, num_processes: int = 2) -> LaunchPlan:
    group = WorkerGroup(
        num_processes=num_processes,
        cpu=True,
        mixed_precision="no",
        num_threads=1,
        master_addr="127.0.0.1",
        master_port=1,
    )
    return LaunchPlan((sys.executable, "-c", code), group)


@pytest.fixture(autouse=True)
def interrupts_raise() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def _no_child_is_left() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def test_good_run_returns_zero_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(_plan("pass")) == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux can pin processes to cores")
def test_workers_run_on_their_shares_and_the_launcher_does_not(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.sched_getaffinity(0)
    first, last = min(before), max(before)
    plan = _plan("import os; print(os.environ['RANK'], os.sched_getaffinity(0), os.environ['ACCELERATE_CPP_CORES'])")
    assert execute(replace(plan, group=replace(plan.group, shares=((last,), (first,))))) == 0
    told = render_cores(before & {first, last})
    assert sorted(capfd.readouterr().out.splitlines()) == [f"0 {{{last}}} {told}", f"1 {{{first}}} {told}"]
    assert os.sched_getaffinity(0) == before


def test_first_failure_is_reported_after_all_other_output(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os\nif os.environ['RANK'] == '1': raise ValueError('boom')\nimport time; time.sleep(600)"
    assert execute(_plan(code)) == 1
    report = capfd.readouterr().err.partition("rank 1 failed first: exit code 1\n")[2]
    assert report.startswith("Traceback (most recent call last)")
    assert report.endswith("ValueError: boom\n")


def test_survivor_that_lost_a_peer_is_not_reported(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "REPORT_SECONDS", 60.0)
    error = "Traceback (most recent call last):\\naccelerate_cpp.errors.PeerLost: rank 1 died"
    # Rank 0 ends first, with the error of a survivor; rank 1, whose end caused it, is seen a moment later.
    code = f"""
import os, sys, signal
if os.environ["RANK"] == "0":
    print("{error}", file=sys.stderr, flush=True)
    os._exit(1)
os.kill(os.getpid(), signal.SIGSEGV)
"""
    assert execute(_plan(code)) == 128 + signal.SIGSEGV
    assert "rank 1 failed first: killed by SIGSEGV (signal 11)" in capfd.readouterr().err


def test_quiet_leaves_the_report_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(_plan("raise SystemExit(3)"), quiet=True) == 3
    assert capfd.readouterr().err == ""


def test_lone_workers_death_by_a_signal_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(_plan("import os; os.kill(os.getpid(), 9)", num_processes=1)) == 137
    assert capfd.readouterr().err == "the worker was killed by SIGKILL (signal 9)\n"


def test_interrupt_during_start_up_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = executed._start

    def interrupted_start(*args: object) -> object:
        if args[2] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return start(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(executed, "_start", interrupted_start)
    assert execute(_plan("import time; time.sleep(600)")) == 130
    assert _no_child_is_left()


def test_worker_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start = executed._start

    def refused_start(*args: object) -> object:
        if args[2] == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(executed, "_start", refused_start)
    with pytest.raises(BlockingIOError):
        execute(_plan("import time; time.sleep(600)"))
    assert _no_child_is_left()


def test_nothing_is_left_open() -> None:
    descriptors = set(os.listdir("/proc/self/fd"))
    threads = set(threading.enumerate())
    execute(_plan("pass"))
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert set(threading.enumerate()) <= threads


def test_without_the_system_calls_one_worker_runs_in_place_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    child = os.fork()
    if child == 0:
        try:
            execute(_plan(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))", 1))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert int((tmp_path / "pid").read_text()) == child


def test_without_the_system_calls_two_workers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(InvalidArgument, match="use num_processes=1"):
        execute(_plan("pass"))
