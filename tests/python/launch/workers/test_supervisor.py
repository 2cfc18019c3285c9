from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from accelerate_cpp.comm.joining import BEGINS, MESSAGE, SAVES
from accelerate_cpp.launch.workers import supervisor as supervisor_module
from accelerate_cpp.launch.workers.attendance import Absence, attendance
from accelerate_cpp.launch.workers.failure import WorkerEnd
from accelerate_cpp.launch.workers.supervisor import Supervisor
from accelerate_cpp.launch.workers.worker import Worker, living_members

SLEEP = ["sleep", "600"]


@pytest.fixture(autouse=True)
def patience_of_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_SECONDS", 60.0)
    monkeypatch.setattr(supervisor_module, "CAUSE_SECONDS", 600.0)
    monkeypatch.setattr(supervisor_module, "REPORT_SECONDS", 0.0)


def _start(rank: int, command: list[str], sink: Callable[[bytes], object] = len) -> Worker:
    read_end, write_end = os.pipe()
    process = subprocess.Popen(command, start_new_session=True, stdout=write_end)
    os.close(write_end)
    return Worker(rank, process.pid, {read_end: sink}, process.wait)


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A pipe with a name; the process that opens it to write says that it is ready."""
    os.mkfifo(tmp_path / "ready")
    return tmp_path / "ready"


def _ended_beside_a_failure(code: str, ready: Path) -> tuple[WorkerEnd, ...]:
    """The ends of two workers: rank 0 runs ``code``, and rank 1 fails as soon as something is ``ready``."""
    with Supervisor() as supervisor:
        supervisor.add(_start(0, _python(code)))
        supervisor.add(_start(1, _python(f"open({str(ready)!r}).close(); raise SystemExit(1)")))
        return supervisor.run().workers


def test_output_is_passed_on_and_its_end_is_told() -> None:
    chunks: list[bytes] = []
    with Supervisor() as supervisor:
        supervisor.add(_start(0, _python("print('hello', end='')"), chunks.append))
        end = supervisor.run()
    assert b"".join(chunks) == b"hello"
    assert chunks[-1] == b""
    assert end.workers == (WorkerEnd(0, 0, False),)


def test_others_are_ended_when_one_fails() -> None:
    with Supervisor() as supervisor:
        sleeping = _start(0, SLEEP)
        supervisor.add(sleeping)
        supervisor.add(_start(1, _python("raise SystemExit(7)")))
        end = supervisor.run()
    assert end.workers == (WorkerEnd(1, 7, False), WorkerEnd(0, -signal.SIGTERM, True))
    assert living_members({sleeping.pid}) == []


def test_rank_that_the_failed_ones_name_may_end_on_its_own(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "failed")
    survivor = _python(f"import os; open({str(tmp_path / 'failed')!r}, 'w').close(); os._exit(1)")
    cause = _python(f"open({str(tmp_path / 'failed')!r}).close(); raise SystemExit(7)")
    with Supervisor(blames=lambda rank: [1] if rank == 0 else None) as supervisor:
        supervisor.add(_start(0, survivor))
        supervisor.add(_start(1, cause))
        end = supervisor.run()
    assert WorkerEnd(1, 7, False) in end.workers


def test_stopped_worker_that_others_name_gets_no_time_and_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(supervisor_module, "CAUSE_SECONDS", 1e6)
    monkeypatch.setattr(supervisor_module, "GRACE_SECONDS", 1e6)
    (tmp_path / "pid").touch()
    stops = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); os.kill(os.getpid(), 19)"
    waits = (
        f"while not (pid := open({str(tmp_path / 'pid')!r}).read()): pass\n"
        "while open(f'/proc/{pid}/stat').read().rpartition(') ')[2][0] != 'T': pass\n"
        "raise SystemExit(1)"
    )
    with Supervisor(blames=lambda rank: [1] if rank == 0 else None) as supervisor:
        supervisor.add(_start(0, _python(waits)))
        supervisor.add(_start(1, _python(stops)))
        end = supervisor.run()
    assert end.workers == (WorkerEnd(0, 1, False), WorkerEnd(1, -signal.SIGTERM, True))
    assert end.stopped == {1}


def test_workers_that_wait_in_vain_are_ended() -> None:
    with attendance() as present, Supervisor(attendance=present) as supervisor:
        for worker, command in enumerate([SLEEP, ["true"]]):
            present.variables(worker)
            supervisor.add(_start(worker, command))
        os.write(present.descriptor, MESSAGE.pack(0, BEGINS))
        end = supervisor.run()
    assert end.workers == (WorkerEnd(1, 0, False), WorkerEnd(0, -signal.SIGTERM, True))
    assert end.absence == Absence(1, [0])


def test_worker_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch, ready: Path) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_SECONDS", 0.2)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(ready)!r}, 'w').close(); time.sleep(600)"
    )
    assert _ended_beside_a_failure(stubborn, ready) == (WorkerEnd(1, 1, False), WorkerEnd(0, -signal.SIGKILL, True))


def test_worker_cleans_up_before_what_it_has_started_is_signalled(ready: Path) -> None:
    parent = (
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "def end(*_):\n"
        "    sys.exit(3 if child.communicate(b'asked')[0] == b'asked' and child.returncode == 0 else 4)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(ready)!r}, 'w').close(); signal.pause()"
    )
    assert _ended_beside_a_failure(parent, ready) == (WorkerEnd(1, 1, False), WorkerEnd(0, 3, True))


def test_what_a_worker_has_started_may_clean_up_after_it(ready: Path, tmp_path: Path) -> None:
    child = (
        "import os, signal, sys\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(tmp_path / 'cleaned')!r}, 'w').close(), sys.exit(0)))\n"
        f"open({str(ready)!r}, 'w').close()\n"
        "while True: signal.pause()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert _ended_beside_a_failure(parent, ready) == (WorkerEnd(1, 1, False), WorkerEnd(0, -signal.SIGTERM, True))
    assert (tmp_path / "cleaned").exists()


def test_processes_that_a_worker_leaves_in_its_group_are_ended() -> None:
    with Supervisor() as supervisor:
        leaving = _start(0, ["sh", "-c", "sleep 600 & sleep 600 &"])
        supervisor.add(leaving)
        assert supervisor.run().workers == (WorkerEnd(0, 0, False),)
        assert living_members({leaving.pid}) == []


def test_process_outside_the_group_that_holds_the_pipe_is_not_waited_for() -> None:
    outside: list[bytes] = []
    with Supervisor() as supervisor:
        leaves = "import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True).pid)"
        supervisor.add(_start(0, [sys.executable, "-c", leaves], outside.append))
        supervisor.run()
    escaped = int(b"".join(outside))
    os.kill(escaped, signal.SIGKILL)


def test_interrupt_is_forwarded_and_reported() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Supervisor(ours) as supervisor:
        supervisor.add(_start(0, SLEEP))
        theirs.send(bytes([signal.SIGINT]))
        end = supervisor.run()
    assert end.interrupted_by == signal.SIGINT
    assert end.workers == (WorkerEnd(0, -signal.SIGINT, True),)


def test_interrupt_of_a_run_that_has_failed_hides_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C, because the others take their time to end."""
    monkeypatch.setattr(supervisor_module, "GRACE_SECONDS", 600.0)
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    cleans_up = _python(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'cleaning'))\n"
        f"os.write({write_end}, b'ready')\n"
        "while True: time.sleep(600)"
    )
    output, other_end = os.pipe()
    process = subprocess.Popen(cleans_up, start_new_session=True, stdout=other_end, pass_fds=[write_end])
    os.close(other_end)
    os.close(write_end)

    def interrupt(chunk: bytes) -> None:
        if chunk:
            theirs.send(bytes([signal.SIGINT]))

    assert os.read(read_end, 5) == b"ready"
    os.close(read_end)
    with ours, theirs, Supervisor(ours) as supervisor:
        supervisor.add(Worker(0, process.pid, {output: interrupt}, process.wait))
        supervisor.add(_start(1, _python("raise SystemExit(7)")))
        end = supervisor.run()
    assert end.workers == (WorkerEnd(1, 7, False), WorkerEnd(0, -signal.SIGKILL, True))
    assert end.interrupted_by is None
    assert (end.is_signalled, end.is_last) == (True, True)


def test_second_interrupt_kills_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_SECONDS", 600.0)  # longer than a test may take
    ours, theirs = socket.socketpair()
    stubborn = _python(
        "import os, signal, time; signal.signal(signal.SIGINT, lambda *a: os.write(1, b'no'))\n"
        "os.write(1, b'ready')\n"
        "while True: time.sleep(600)"
    )
    with ours, theirs, Supervisor(ours) as supervisor:
        # Each line of the worker is answered with an interrupt: first when it is ready, then when it refuses.
        supervisor.add(_start(0, stubborn, lambda chunk: theirs.send(bytes([signal.SIGINT])) if chunk else None))
        end = supervisor.run()
    assert end.workers == (WorkerEnd(0, -signal.SIGKILL, True),)


def test_other_signals_do_not_interrupt() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Supervisor(ours) as supervisor:
        theirs.send(bytes([signal.SIGCHLD]))
        supervisor.add(_start(0, ["true"]))
        assert supervisor.run().interrupted_by is None


def test_leaving_by_an_exception_ends_and_reaps_everything() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    worker = _start(0, SLEEP)
    with pytest.raises(ZeroDivisionError), Supervisor() as supervisor:
        supervisor.add(worker)
        raise ZeroDivisionError
    with pytest.raises(ChildProcessError):
        os.waitpid(worker.pid, 0)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_worker_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(24, "Too many open files")

    worker = _start(0, SLEEP)
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"), Supervisor() as supervisor:
        supervisor.add(worker)
    with pytest.raises(ChildProcessError):
        os.waitpid(worker.pid, 0)
    for descriptor in worker.outputs:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("number", "interrupted_by"), [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)]
)
def test_the_first_signal_leaves_workers_alone_that_save_as_their_round_has_to_end(
    tmp_path: Path, number: int, interrupted_by: int
) -> None:
    for name in ("ready", "saves", "go"):
        os.mkfifo(tmp_path / name)
    saving = _python(
        "import os, signal\n"
        "def save(number, frame):\n"
        f"    open({str(tmp_path / 'saves')!r}, 'w').close()\n"
        f"    open({str(tmp_path / 'go')!r}).close()\n"
        "    os._exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "while True: signal.pause()"
    )
    signals, interrupts = socket.socketpair()
    lifeline, end = os.pipe()

    def interrupt() -> None:
        (tmp_path / "ready").open().close()  # it handles signals from now on
        os.close(end)
        (tmp_path / "saves").open().close()
        interrupts.send(bytes([number]))
        waiting = bytearray(4)
        while fcntl.ioctl(signals, termios.FIONREAD, waiting) == 0 and any(waiting):
            os.sched_yield()
        (tmp_path / "go").open("w").close()

    outside = threading.Thread(target=interrupt)
    with signals, interrupts, attendance() as present:
        present.variables(0)
        os.write(present.descriptor, MESSAGE.pack(0, SAVES))
        with Supervisor(signals, lifeline=lifeline, attendance=present) as supervisor:
            supervisor.add(_start(0, saving))
            outside.start()
            run = supervisor.run()
        outside.join()
    os.close(lifeline)
    assert [end.exit_code for end in run.workers] == [75]
    assert (run.interrupted_by, run.is_signalled, run.savers) == (interrupted_by, True, {0})


def test_workers_that_would_save_get_no_time_for_it_where_others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "GRACE_SECONDS", 0.2)
    lifeline, end = os.pipe()
    waiting_for_others = (
        "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\nprint(1, flush=True)\n"
        "while True: signal.pause()"
    )
    is_over = threading.Event()

    def end_lifeline(_: bytes) -> None:
        if not is_over.is_set():
            is_over.set()
            os.close(end)

    with attendance() as present:
        present.variables(0)
        os.write(present.descriptor, MESSAGE.pack(0, SAVES))
        with Supervisor(lifeline=lifeline, attendance=present, can_save=lambda: False) as supervisor:
            supervisor.add(_start(0, _python(waiting_for_others), end_lifeline))
            run = supervisor.run()
    os.close(lifeline)
    assert [end.exit_code for end in run.workers] == [-signal.SIGKILL]
