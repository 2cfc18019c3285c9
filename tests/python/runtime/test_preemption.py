"""Notices in one process; several are in tests/distributed/test_preemption.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FORKS = """
import os, signal
from accelerate_cpp.runtime import preemption

preemption.listen()
child = os.fork()
if child == 0:
    while True:
        signal.pause()
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
assert preemption._noticed == signal.SIGTERM

child = os.fork()
if child == 0:  # it may listen itself, and knows nothing of what its parent has noticed
    preemption.listen()
    assert preemption._noticed is None
    os.kill(os.getpid(), signal.SIGUSR1)
    assert preemption._noticed == signal.SIGUSR1
    other = os.fork()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "notices come to both"
    assert other == 0 or os.waitpid(other, 0)[1] == 0
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
ACCUMULATES = """
import os, signal
import torch
from accelerate_cpp import Accelerator

run = Accelerator(cpu=True, gradient_accumulation_steps=3)
model = torch.nn.Linear(1, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
run.leave_if_preempted("checkpoint")
for batch in range(3):
    with run.accumulate(model):
        run.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    if batch == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
    print(batch, flush=True)
    run.leave_if_preempted("checkpoint")
"""
ENDS = """
import atexit, signal
from accelerate_cpp.runtime import preemption

atexit.register(lambda: print(*(signal.getsignal(number).name for number in preemption.NOTICES)))  # called last
preemption.listen()
"""
CANNOT_SAVE = """
import signal
from accelerate_cpp import Accelerator
from accelerate_cpp.utils import ProjectConfiguration

for numbered in (False, True):
    run = Accelerator(cpu=True, project_config=ProjectConfiguration("run", automatic_checkpoint_naming=numbered))
    try:
        run.leave_if_preempted()
    except ValueError as error:
        print(error)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
run.project_configuration.iteration = 1
run.leave_if_preempted()
assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
"""


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)


def test_a_process_that_a_program_starts_by_a_fork_ends_by_a_notice(tmp_path: Path) -> None:
    done = _run(FORKS, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_notice_while_a_program_ends_changes_nothing(tmp_path: Path) -> None:
    assert _run(ENDS, tmp_path).stdout == "SIG_IGN SIG_IGN\n"


def test_a_program_does_not_leave_between_micro_batches_of_a_step(tmp_path: Path) -> None:
    """What they have accumulated is in no checkpoint."""
    pytest.importorskip("torch")
    done = _run(ACCUMULATES, tmp_path)
    assert (done.returncode, done.stdout.split()) == (75, ["0", "1", "2"]), done.stderr
    assert (tmp_path / "checkpoint" / "model.safetensors").is_file()


def test_a_program_that_could_not_save_learns_it_before_a_notice(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "run" / "checkpoints" / "checkpoint_0").mkdir(parents=True)
    done = _run(CANNOT_SAVE, tmp_path)
    assert done.returncode == 0, done.stderr
    without_numbers, without_resuming = done.stdout.splitlines()
    assert without_numbers.startswith("save_state needs output_dir")
    assert "checkpoint_0 already exists" in without_resuming
