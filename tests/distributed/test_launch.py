"""``accelerate-cpp launch`` with real processes and real faults."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launched import lives, outputs_of, patient_launch

# Every worker of these scripts names itself by a file pid-<rank>; the file appears with its whole content.
NAMES_ITSELF = """
import os, signal, subprocess, sys, time
RANK = os.environ.get("RANK", "0")

def leave(name, text):
    with open(f"{name}.part", "w") as file:
        file.write(str(text))
    os.rename(f"{name}.part", name)

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)

leave(f"pid-{RANK}", os.getpid())
"""
WAITS = "time.sleep(600)\n"
PATIENCE_SECONDS = 120.0


class Job:
    """A running launch in a folder of its own.

    Args:
        grace_seconds: what workers get to end after each signal, where the launcher's own may be too little.
    """

    def __init__(self, folder: Path, script: str, *flags: str, grace_seconds: float | None = None) -> None:
        self.folder = folder
        (folder / "train.py").write_text(NAMES_ITSELF + script)
        patience = {} if grace_seconds is None else {"supervisor_GRACE_SECONDS": grace_seconds}
        self.process = subprocess.Popen(
            [*patient_launch(**patience), "--cpu", *flags, "train.py"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A test runner in the background may ignore interrupts, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def end(self) -> tuple[int, str, str]:
        """Waits for the launcher; its exit status, standard output and standard error."""
        out, err = outputs_of(self.process, PATIENCE_SECONDS)
        return self.process.returncode, out.decode(), err.decode()

    def pid(self, name: str) -> int:
        """The pid in file ``name``, once it is there."""
        eventually((self.folder / name).exists)
        return int((self.folder / name).read_text())


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start(script: str, num_processes: int = 2, *flags: str, grace_seconds: float | None = None) -> Job:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, script, "--num_processes", str(num_processes), *flags, grace_seconds=grace_seconds))
        return jobs[-1]

    yield start
    for job in jobs:
        job.process.kill()
        job.process.communicate()


def test_output_and_success_are_passed_on(launch: Callable[..., Job]) -> None:
    status, out, err = launch("print('out', RANK); print('err', RANK, file=sys.stderr)").end()
    assert status == 0
    assert sorted(out.splitlines()) == ["out 0", "out 1"]
    assert sorted(err.splitlines()) == ["[1] err 1", "err 0"]


def test_line_that_all_ranks_say_is_shown_once_with_their_number(launch: Callable[..., Job]) -> None:
    status, _, err = launch("wait_for('pid-0'); wait_for('pid-1'); print('careful', file=sys.stderr)").end()
    assert status == 0
    # A slow machine may show them apart; what is said twice then is told by whom.
    assert sorted(err.splitlines()) in (["[×2] careful"], ["[1] careful", "careful"])


def test_one_process_is_a_plain_run(launch: Callable[..., Job]) -> None:
    status, out, _ = launch("print([n for n in os.environ if n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')])", 1).end()
    assert (status, out) == (0, "[]\n")


def test_standard_error_is_live_and_unchanged(launch: Callable[..., Job]) -> None:
    job = launch("sys.stderr.write('\\r 50%'); sys.stderr.flush(); wait_for('seen')", 1)
    assert job.process.stderr is not None
    received = b""
    while received != b"\r 50%":
        readable, _, _ = select.select([job.process.stderr], [], [], PATIENCE_SECONDS)
        assert readable
        received += os.read(job.process.stderr.fileno(), 100)
    (job.folder / "seen").touch()
    assert job.end()[0] == 0


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("raise ValueError('boom')", 1, "exit code 1"),
        ("os._exit(7)", 7, "exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "killed by SIGSEGV (signal 11)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (signal 9)"),
    ],
)
def test_fault_of_one_worker_ends_all_and_is_told_last(
    launch: Callable[..., Job], fault: str, status: int, words: str
) -> None:
    job = launch(f"wait_for('pid-0')\nprint('fault', file=sys.stderr)\nif RANK == '1': {fault}\n" + WAITS)
    actual, _, err = job.end()
    assert actual == status
    report = err.partition(f") failed first: {words}\n")[2]
    assert report.endswith("ValueError: boom\n" if "boom" in fault else "fault\n")
    assert not lives(job.pid("pid-0"))


def test_killed_worker_ends_the_run(launch: Callable[..., Job]) -> None:
    job = launch(WAITS)
    workers = [job.pid("pid-0"), job.pid("pid-1")]
    os.kill(workers[1], signal.SIGKILL)
    assert job.end()[0] == 137
    assert not any(map(lives, workers))


def test_killed_launcher_takes_its_workers_along(launch: Callable[..., Job]) -> None:
    job = launch(WAITS)
    workers = [job.pid("pid-0"), job.pid("pid-1")]
    job.process.kill()
    eventually(lambda: not any(map(lives, workers)))


# The last says no to every signal that can be refused; the data loader's have been forked.
STARTS_OTHERS = """
import torch
from torch.utils.data import DataLoader
first = subprocess.Popen(['sleep', '600']).pid
second = subprocess.Popen(['sh', '-c', 'trap "" HUP INT QUIT TERM; sleep 600; sleep 600']).pid
batches = iter(DataLoader(range(100), num_workers=2))
next(batches)
pids = [first, second, *(worker.pid for worker in batches._workers)]
leave(f'started-{RANK}', ' '.join(map(str, pids)))
"""


def _pids_of_others(folder: Path) -> list[int]:
    for rank in range(2):
        eventually((folder / f"started-{rank}").exists)
    return [int(pid) for rank in range(2) for pid in (folder / f"started-{rank}").read_text().split()]


def test_killed_launcher_takes_along_what_workers_have_started(launch: Callable[..., Job]) -> None:
    job = launch(STARTS_OTHERS + WAITS)
    others = _pids_of_others(job.folder)
    assert all(map(lives, others))
    job.process.kill()
    eventually(lambda: not any(map(lives, [job.pid("pid-0"), job.pid("pid-1"), *others])))


def test_sigquit_lets_workers_clean_up_and_takes_along_what_they_have_started(launch: Callable[..., Job]) -> None:
    cleans_up = "signal.signal(signal.SIGTERM, lambda *_: (leave(f'cleaned-{RANK}', 1), sys.exit(1)))\n"
    job = launch(cleans_up + STARTS_OTHERS + WAITS, grace_seconds=20)  # which the one that refuses takes
    others = _pids_of_others(job.folder)
    job.process.send_signal(signal.SIGQUIT)
    assert job.end()[0] == 128 + signal.SIGQUIT
    assert all((job.folder / f"cleaned-{rank}").exists() for rank in range(2))
    assert not any(map(lives, others))


def test_killed_notebook_takes_along_what_workers_have_started(tmp_path: Path) -> None:
    (tmp_path / "function.py").write_text(f"{NAMES_ITSELF}\n{STARTS_OTHERS}\n{WAITS}")
    (tmp_path / "notebook.py").write_text(
        "import runpy\n"
        "from accelerate_cpp import notebook_launcher\n"
        "notebook_launcher(lambda: runpy.run_path('function.py'), num_processes=2)\n"
    )
    with subprocess.Popen(
        [sys.executable, "notebook.py"], cwd=tmp_path, env={**os.environ, "ACCELERATE_USE_CPU": "true"}
    ) as notebook:
        others = _pids_of_others(tmp_path)
        assert all(map(lives, others))
        notebook.kill()
    eventually(lambda: not any(map(lives, others)))


@pytest.mark.parametrize("script", [WAITS, "if RANK == '0': raise SystemExit(0)\n" + WAITS])
def test_ctrl_c_ends_the_workers(launch: Callable[..., Job], script: str) -> None:
    job = launch(script)
    workers = [job.pid("pid-0"), job.pid("pid-1")]
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert not any(map(lives, workers))


def test_ctrl_c_lets_workers_clean_up(launch: Callable[..., Job]) -> None:
    job = launch(
        "try:\n    leave(f'ready-{RANK}', 1); time.sleep(600)\n"
        "except KeyboardInterrupt:\n    leave(f'cleaned-{RANK}', 1)\n",
        grace_seconds=PATIENCE_SECONDS,
    )
    for rank in range(2):
        eventually((job.folder / f"ready-{rank}").exists)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert all((job.folder / f"cleaned-{rank}").exists() for rank in range(2))


def test_second_ctrl_c_kills_workers_that_refuse(launch: Callable[..., Job]) -> None:
    job = launch(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGINT, lambda *_: leave(f'refused-{RANK}', 1))\n"
        "leave(f'ready-{RANK}', 1)\nwhile True: time.sleep(600)\n",
        grace_seconds=PATIENCE_SECONDS,
    )
    for answer in ("ready", "refused"):
        for rank in range(2):
            eventually((job.folder / f"{answer}-{rank}").exists)
        job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert not any(map(lives, [job.pid("pid-0"), job.pid("pid-1")]))


def test_sigterm_ends_the_workers(launch: Callable[..., Job]) -> None:
    job = launch(WAITS)
    workers = [job.pid("pid-0"), job.pid("pid-1")]
    job.process.terminate()
    assert job.end()[0] == 143
    assert not any(map(lives, workers))


@pytest.mark.parametrize(("last", "status"), [("raise SystemExit(3)", 3), ("raise SystemExit(0)", 0)])
def test_grandchildren_are_ended_however_the_run_ends(launch: Callable[..., Job], last: str, status: int) -> None:
    job = launch(f"leave(f'child-{{RANK}}', subprocess.Popen(['sleep', '600']).pid)\nwait_for('child-0')\n{last}\n")
    assert job.end()[0] == status
    children = [job.pid(path.name) for path in job.folder.glob("child-?")]
    assert children
    assert not any(map(lives, children))


def test_eight_jobs_at_once_do_not_meet(launch: Callable[..., Job]) -> None:
    # Each rank writes its line into the file of its job and waits until both are there.
    script = """
import fcntl
with open(f"/proc/self/fd/{os.environ['ACCELERATE_CPP_RENDEZVOUS_FD']}", "a+") as meeting:
    fcntl.flock(meeting, fcntl.LOCK_EX)
    meeting.write(f"{os.getcwd()} {RANK}\\n")
    meeting.flush()
    fcntl.flock(meeting, fcntl.LOCK_UN)
    lines = []
    while len(lines) < 2:
        time.sleep(0.01)
        meeting.seek(0)
        lines = meeting.read().splitlines()
print(sorted(lines) == [f"{os.getcwd()} {rank}" for rank in range(2)], os.environ["MASTER_PORT"])
"""
    ends = [job.end() for job in [launch(script) for _ in range(8)]]
    assert [end[0] for end in ends] == [0] * 8
    assert all(line.startswith("True ") for end in ends for line in end[1].splitlines())


def test_torchs_file_store_meets_over_the_inherited_descriptor(launch: Callable[..., Job]) -> None:
    pytest.importorskip("torch")
    script = """
import torch, torch.distributed as dist
store = dist.FileStore(f"/proc/self/fd/{os.environ['ACCELERATE_CPP_RENDEZVOUS_FD']}", 3)
dist.init_process_group("gloo", store=store, rank=int(RANK), world_size=3)
total = torch.tensor([float(RANK)])
dist.all_reduce(total)
print(total.item())
dist.destroy_process_group()
"""
    status, out, err = launch(script, 3).end()
    assert status == 0, err
    assert out == "3.0\n" * 3
