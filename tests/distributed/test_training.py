"""What must hold of a training run: equal results, whatever the number of processes, and nothing left after any end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from launched import patient_launch
from processes import files_in_shared_memory, run_processes

STEPS = 50
GLOBAL_BATCH = 12
PATIENCE_SECONDS = 120.0


def digits_losses(steps: int) -> tuple[list[float], list[bytes]]:
    """Trains on the real digits; returns the loss over the global batch and the weights, by step."""
    import torch
    from sklearn.datasets import load_digits
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    from accelerate_cpp import Accelerator, DataLoaderConfiguration

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=GLOBAL_BATCH, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=True, dataloader_config=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, weights = [], []
    for (inputs, labels), _ in zip(loader, range(steps), strict=False):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        weights.append(b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters()))
    return losses, weights


def test_two_processes_train_like_one_with_equal_bits_on_every_rank_and_from_run_to_run() -> None:
    [(alone, _)] = run_processes(digits_losses, 1, STEPS, environment={"WORLD_SIZE": ""})
    first = run_processes(digits_losses, 2, STEPS)
    second = run_processes(digits_losses, 2, STEPS)
    assert len(alone) == STEPS
    assert first[0][0] == pytest.approx(alone, rel=1e-5)
    assert first[0][1] == first[1][1], "weights differ between the ranks after some step"
    assert first == second, "a second run gave other bits"


TRAINS_FOREVER = """
import os, sys, torch
from accelerate_cpp import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
step = 0
while True:
    optimizer.zero_grad()
    accelerator.backward(model(torch.randn(8, 64)).square().mean())
    optimizer.step()
    step += 1
    if step == 20:
        with open(f"pid-{accelerator.process_index}.part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(file.name, file.name.removesuffix(".part"))
    if step == 40 and accelerator.process_index == 1 and "raise" in sys.argv:
        raise ValueError("the batch is bad")
"""


class Run:
    """A launched training run of two processes in a folder of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.shared_memory = files_in_shared_memory()
        (folder / "train.py").write_text(TRAINS_FOREVER)
        self.process = subprocess.Popen(
            [
                # Survivors get the time that they take to tell what they have seen.
                *patient_launch(supervisor_REPORT_SECONDS=PATIENCE_SECONDS / 2),
                "--cpu",
                "--num_processes",
                "2",
                "train.py",
                *arguments,
            ],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pid(self, rank: int) -> int:
        """The process of ``rank``, once it has trained for 20 steps."""
        path = self.folder / f"pid-{rank}"
        self.wait_until(lambda: path.exists() or self.process.poll() is not None)
        assert path.exists(), self.output()
        return int(path.read_text())

    def output(self) -> str:
        """Everything that was printed, once the run has ended."""
        return self.process.communicate(timeout=PATIENCE_SECONDS)[0]

    def assert_nothing_is_left(self, pids: list[int]) -> None:
        self.wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        # Processes of other tests may have some for a moment.
        self.wait_until(lambda: files_in_shared_memory() <= self.shared_memory)

    @staticmethod
    def wait_until(condition) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "the run did not get there"
            time.sleep(0.01)


def test_survivor_of_a_killed_worker_names_it_and_nothing_is_left(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pids = [run.pid(0), run.pid(1)]
    os.kill(pids[1], signal.SIGKILL)
    output = run.output()
    assert run.process.returncode == 128 + signal.SIGKILL
    assert re.search(r"^rank 0: accelerate_cpp.errors.PeerLost: .*rank 1", output, re.MULTILINE)
    assert "rank 1 (host " in output
    assert ") failed first: killed by SIGKILL" in output
    run.assert_nothing_is_left(pids)


def test_exception_of_a_worker_is_the_last_thing_that_is_shown(tmp_path: Path) -> None:
    run = Run(tmp_path, "raise")
    pids = [run.pid(0), run.pid(1)]
    output = run.output()
    assert run.process.returncode == 1
    assert output.rstrip().endswith("ValueError: the batch is bad")
    run.assert_nothing_is_left(pids)


def test_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pids = [run.pid(0), run.pid(1)]
    run.process.kill()
    run.process.communicate(timeout=PATIENCE_SECONDS)
    run.assert_nothing_is_left(pids)


def test_ctrl_c_ends_training(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pids = [run.pid(0), run.pid(1)]
    run.process.send_signal(signal.SIGINT)
    run.output()
    assert run.process.returncode == 130
    run.assert_nothing_is_left(pids)


def uneven_batch() -> str:
    """The message of a loader whose batches cannot be divided among the processes."""
    import torch

    from accelerate_cpp import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    try:
        accelerator.prepare(torch.utils.data.DataLoader(range(12), batch_size=3))
    except ValueError as error:
        return str(error)
    return ""


def test_batch_that_cannot_be_split_is_refused_on_every_rank() -> None:
    messages = run_processes(uneven_batch, 2)
    assert messages[0] == messages[1]
    assert "round multiple of the number of processes (2)" in messages[0]
    assert "the batch size (3)" in messages[0]
