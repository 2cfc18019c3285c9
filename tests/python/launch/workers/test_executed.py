from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from accelerate_cpp.config.env_table import render_cores
from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.launch.plan.environment import WorkerGroup
from accelerate_cpp.launch.plan.launch_plan import LaunchPlan
from accelerate_cpp.launch.plan.machines import Launchers
from accelerate_cpp.launch.workers import executed, news, supervisor
from accelerate_cpp.launch.workers.executed import execute
from accelerate_cpp.launch.workers.streams import Logs, Streams


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
def workers_get_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 60.0)


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


@pytest.mark.parametrize(
    ("code", "status"), [("raise ValueError('no data')", 1), ("pass", 1), ("raise SystemExit(3)", 3)]
)
def test_a_report_that_cannot_be_written_hides_no_error(
    code: str, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").mkdir()
    assert execute(replace(_plan(code), report=tmp_path / "report.json")) == status
    said = capfd.readouterr().err
    assert "report.json cannot be written: Is a directory" in said
    assert ("failed first" in said) == (code != "pass"), said
    assert ("ValueError: no data" in said) == ("ValueError" in code), said


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
    report = capfd.readouterr().err.partition(") failed first: exit code 1\n")[2]
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
    err = capfd.readouterr().err
    assert "\nrank 1 (host " in err
    assert ") failed first: killed by SIGSEGV (signal 11)" in err


@pytest.mark.parametrize("quiet", [False, True])
def test_error_is_told_while_its_worker_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], quiet: bool
) -> None:
    told: list[str] = []
    os.mkfifo(tmp_path / "told")
    opened = "" if quiet else f"atexit.register(lambda: open({str(tmp_path / 'told')!r}).close())"
    code = f"import atexit, os\nif os.environ['RANK'] == '1':\n    {opened or 'pass'}\n    raise ValueError('boom')"

    def tell(streams: Streams, sentence: str) -> None:
        told.append(sentence)
        (tmp_path / "told").open("w").close()

    monkeypatch.setattr(news, "NEWS_SECONDS", 0.0)
    monkeypatch.setattr(Streams, "announce", tell)
    assert execute(_plan(code), quiet=quiet) == 1
    assert len(told) == (not quiet)
    assert all(
        re.fullmatch(r"rank 1 \(host .*\) failed: ValueError: boom; the processes are ending", one) for one in told
    )
    assert capfd.readouterr().err.endswith("ValueError: boom\n")


def test_quiet_leaves_the_report_out(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(_plan("raise SystemExit(3)"), quiet=True) == 3
    assert capfd.readouterr().err == ""


def test_lone_workers_death_by_a_signal_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(_plan("import os; os.kill(os.getpid(), 9)", num_processes=1)) == 137
    assert capfd.readouterr().err == "the worker was killed by SIGKILL (signal 9)\n"


def test_lone_worker_of_a_larger_run_is_named_by_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    plan = _plan("import os; os.kill(os.getpid(), 9)", num_processes=1)
    assert execute(replace(plan, group=replace(plan.group, launchers=Launchers(2, 1)))) == 137
    err = capfd.readouterr().err
    assert err.startswith("rank 1 (host ")
    assert err.endswith(") failed first: killed by SIGKILL (signal 9)\n")


FAILS_TWICE = """
import os, sys
print("try", os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_MAX_RESTARTS"], flush=True)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "2":
    sys.exit(4)
"""


def test_failed_run_is_started_again_as_often_as_asked(capfd: pytest.CaptureFixture[str]) -> None:
    assert execute(replace(_plan(FAILS_TWICE), max_restarts=5)) == 0
    out, err = capfd.readouterr()
    assert sorted(set(out.splitlines())) == ["try 0 5", "try 1 5", "try 2 5"]
    assert err.count("starting all again, restart ") == 2
    assert "failed first: exit code 4; starting all again, restart 2 of 5" in err


def test_last_attempt_says_how_the_run_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = replace(_plan(FAILS_TWICE), max_restarts=1, report=tmp_path / "report.json")
    assert execute(plan) == 4
    assert "failed first: exit code 4\n" in capfd.readouterr().err
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["exit_status"], len(report["attempts"])) == (4, 2)
    assert report["attempts"][1]["workers"][1]["exit_code"] == 4


def test_interrupt_ends_the_attempts(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        f"import os, time; os.environ['RANK'] == '0' and os.kill({os.getpid()}, {int(signal.SIGINT)}); time.sleep(600)"
    )
    assert execute(replace(_plan(code), max_restarts=5)) == 130
    assert "starting all again" not in capfd.readouterr().err


def test_interrupt_after_a_failure_ends_the_attempts_and_hides_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "ready")
    code = f"""
import os, signal, time
if os.environ["RANK"] == "1":
    open({str(tmp_path / "ready")!r}).close()
    raise ValueError("boom")
signal.signal(signal.SIGTERM, lambda *_: os.kill({os.getpid()}, signal.SIGINT))
open({str(tmp_path / "ready")!r}, "w").close()
while True:
    time.sleep(600)
"""
    assert execute(replace(_plan(code), max_restarts=5)) == 1
    err = capfd.readouterr().err
    assert "starting all again" not in err
    assert ") failed first: exit code 1\n" in err
    assert err.endswith("ValueError: boom\n")


def test_output_goes_to_files_and_is_shown_with_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    assert execute(replace(_plan(code), logs=Logs(tmp_path, (3, 3)))) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1"]
    assert "err\n" in err
    files = {str(path.relative_to(tmp_path / "attempt_0")): path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {
        "0/stdout.log": "out 0\n",
        "1/stdout.log": "out 1\n",
        "0/stderr.log": "err\n",
        "1/stderr.log": "err\n",
    }


def test_output_that_no_file_can_hold_is_shown_and_fails_the_launch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stdout.log").symlink_to("/dev/full")
    assert execute(replace(_plan("print('precious')", 1), logs=Logs(tmp_path, (3,)))) == 1
    out, err = capfd.readouterr()
    assert out == "precious\n"
    assert "No space left on device" in err


def test_interrupt_during_start_up_ends_what_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    start = executed.start_program

    def interrupted_start(*args: object, **others: object) -> object:
        if args[1] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return start(*args, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(executed, "start_program", interrupted_start)
    assert execute(_plan("import time; time.sleep(600)")) == 130
    assert _no_child_is_left()


def test_worker_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    start = executed.start_program

    def refused_start(*args: object, **others: object) -> object:
        if args[1] == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*args, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(executed, "start_program", refused_start)
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


def test_without_the_system_calls_nothing_can_be_monitored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(InvalidArgument, match="--monitor needs Linux"):
        execute(replace(_plan("pass", 1), monitor=True))


def test_monitored_workers_have_slots_of_their_own_and_the_log_says_how_far_they_are(
    capfd: pytest.CaptureFixture[str],
) -> None:
    steps = "from accelerate_cpp.config import env_table; from accelerate_cpp.runtime.progress_board import open_slot; "
    steps += "place = env_table.BOARD.get(); slot = open_slot(place, 1); print(place[1]); "
    steps += "[slot.add_step(n * 10**9, 0) for n in range(1, 6)]"
    assert execute(replace(_plan(steps), monitor=True)) == 0
    out, err = capfd.readouterr()
    assert sorted(out.split()) == ["0", "1"]
    assert err.startswith("accelerate-cpp: step ")
