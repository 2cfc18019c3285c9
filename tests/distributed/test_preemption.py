"""``leave_if_preempted``: a notice to one process saves the state of all, and the launch ends to be started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("torch")

from launched import STARTED, patient_launch

PATIENCE_SECONDS = 240.0
TRAINS = """
import os
import torch
from accelerate_cpp import Accelerator
from accelerate_cpp.utils import ProjectConfiguration

project = ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))


class Steps:
    taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


steps = Steps()
accelerator.register_for_checkpointing(steps)
if accelerator.resume():
    print(f"resumed {steps.taken}", flush=True)
while True:
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    steps.taken += 1
    accelerator.leave_if_preempted()
    if steps.taken % 20 == 0:
        print(f"pid {accelerator.process_index} {os.getpid()} {steps.taken}", flush=True)
"""

STUCK = """
    if steps.taken < 40:
        accelerator.leave_if_preempted()
    else:
        import time
        time.sleep(1e6)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where ``train.py`` is; no launcher is left after the test."""
    (tmp_path / "train.py").write_text(TRAINS)
    yield tmp_path
    for launcher in STARTED:
        launcher.kill()
        launcher.communicate()
    STARTED.clear()


def _launch(folder: Path, *flags: str) -> tuple[subprocess.Popen[str], dict[int, int], list[str]]:
    """A launch of 2 processes that both train, their process ids by rank, and what they have printed."""
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"]
    launcher = subprocess.Popen(
        [*command, *flags, "train.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    STARTED.append(launcher)
    pids: dict[int, int] = {}
    lines: list[str] = []
    assert launcher.stdout is not None
    for line in launcher.stdout:
        lines.append(line)
        if line.startswith("pid "):
            _, rank, pid, _ = line.split()
            pids[int(rank)] = int(pid)
        if len(pids) == 2:
            return launcher, pids, lines
    raise AssertionError(launcher.stderr.read() if launcher.stderr else lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_a_notice_to_the_launcher_saves_and_ends_with_the_code_for_requeueing(
    folder: Path, number: signal.Signals
) -> None:
    launcher, _, _ = _launch(folder, "--max_restarts", "3")
    launcher.send_signal(number)
    _, err = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 75, err
    assert f"{number.name} has come: the state of the run is in" in err
    assert "the run has saved its state and left, to be started again (exit code 75)" in err
    assert "starting all again" not in err
    _, _, lines = _launch(folder)
    assert any(line.startswith("resumed ") and int(line.split()[1]) >= 20 for line in lines), lines


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGUSR1])
def test_a_notice_to_the_launcher_and_all_processes_at_once_is_one_notice(folder: Path, number: signal.Signals) -> None:
    """So Slurm sends it: to whatever runs in a step. Workers get it from the launcher once more."""
    launcher, pids, _ = _launch(folder)
    for pid in (launcher.pid, *pids.values()):
        with suppress(ProcessLookupError):  # the first notice may end the run before the last is sent
            os.kill(pid, number)
    _, err = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 75, err
    assert "the run has saved its state and left" in err
    _, _, lines = _launch(folder)
    assert any(line.startswith("resumed ") for line in lines), lines


def test_a_notice_while_workers_start_is_kept_for_them(folder: Path) -> None:
    """SIGUSR1 would end them before they have said what it means to them."""
    command = [*patient_launch(notices_HELD_SECONDS=PATIENCE_SECONDS), "--cpu", "--num_processes", "2", "train.py"]
    launcher = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    STARTED.append(launcher)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    launcher.send_signal(signal.SIGUSR1)
    _, err = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 75, err


def test_a_notice_to_one_process_is_heard_by_all(folder: Path) -> None:
    launcher, pids, _ = _launch(folder)
    os.kill(pids[1], signal.SIGTERM)
    _, err = launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 75, err
    assert "another process was told to end" in err


@pytest.mark.long
def test_who_does_not_ask_ends_by_the_signal_as_before(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINS.replace("    accelerator.leave_if_preempted()\n", ""))
    launcher, _, _ = _launch(folder)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=PATIENCE_SECONDS)
    assert launcher.returncode == 128 + signal.SIGTERM


def test_the_code_of_another_program_is_a_failure_like_others(folder: Path) -> None:
    """Only a worker that has said so saves: 75 of one that has not ends the run as any other code does."""
    (folder / "train.py").write_text(
        "import sys, time\nfrom accelerate_cpp import Accelerator\nrank = Accelerator(cpu=True).process_index\n"
        "sys.exit(75) if rank == 1 else time.sleep(100000)\n"
    )
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2", "train.py"]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert result.returncode == 75
    assert "rank 1 (host " in result.stderr
    assert "failed first: exit code 75" in result.stderr


def test_further_signals_end_a_launch_whose_workers_never_get_to_save(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINS.replace("    accelerator.leave_if_preempted()", STUCK))
    launcher, _, _ = _launch(folder)
    deadline = time.monotonic() + PATIENCE_SECONDS
    launcher.send_signal(signal.SIGTERM)
    while launcher.poll() is None:
        assert time.monotonic() < deadline
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.1)
    # An interrupt that comes after all have ended ends the launcher itself: as it leaves, or the interpreter after it.
    assert launcher.returncode in (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGINT)
