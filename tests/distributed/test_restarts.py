"""``--max_restarts``: a run whose workers are killed again and again ends where an undisturbed one does."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

PATIENCE_SECONDS = 600.0
SCRIPT = """
import os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from accelerate_cpp import Accelerator, DataLoaderConfiguration
from accelerate_cpp.utils import ProjectConfiguration, set_seed

set_seed(5)
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
    project_config=ProjectConfiguration(project_dir=".", automatic_checkpoint_naming=True, total_limit=2),
)
rank = accelerator.process_index
with open(f"pid-{rank}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"pid-{rank}.part", f"pid-{rank}")

features = torch.linspace(-1, 1, 192).reshape(48, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
loader = DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


class Progress:
    steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
if accelerator.resume():
    print(f"resumed at step {progress.steps}", flush=True)
if accelerator.is_main_process:
    print("begins", flush=True)
while progress.steps < int(sys.argv[1]):
    for batch, target in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(batch), target))
        optimizer.step()
        progress.steps += 1
        if accelerator.is_main_process:
            print(f"step {progress.steps}", flush=True)
        accelerator.save_state()
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save(weights, "weights.pt")
accelerator.end_training()
"""


SHARDED = (
    "--use_fsdp",
    "--fsdp_version",
    "2",
    "--fsdp_auto_wrap_policy",
    "SIZE_BASED_WRAP",
    "--fsdp_min_num_params",
    "9",
)


def _run(folder: Path, steps: int, kills: list[int], flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Trains, and kills a worker chosen at random at each of the steps ``kills``, or soon after.

    What the workers of an earlier attempt had told beyond their last kill is still read in the next one.
    """
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    chance = random.Random(3)
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--max_restarts", str(len(kills)), "--report", "report.json", *flags, "train.py", str(steps)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        deadline = time.monotonic() + PATIENCE_SECONDS
        lines, left, runs = [], list(kills), False
        for line in launcher.stdout:
            assert time.monotonic() < deadline
            lines.append(line)
            runs = runs or line == "begins\n"
            if left and runs and line.startswith("step ") and int(line.split()[1]) >= left[0]:
                left.pop(0)
                runs = False
                os.kill(int((folder / f"pid-{chance.randrange(2)}").read_text()), signal.SIGKILL)
        assert launcher.stderr is not None
        return subprocess.CompletedProcess(command, launcher.wait(), "".join(lines), launcher.stderr.read())


def _trains_on_as_if_undisturbed(tmp_path: Path, steps: int, kills: list[int], flags: Sequence[str] = ()) -> None:
    import torch

    undisturbed = _run(tmp_path / "undisturbed", steps, [], flags)
    assert undisturbed.returncode == 0, undisturbed.stderr
    disturbed = _run(tmp_path / "disturbed", steps, kills, flags)
    assert disturbed.returncode == 0, disturbed.stderr
    report = json.loads((tmp_path / "disturbed" / "report.json").read_text())
    assert len(report["attempts"]) == len(kills) + 1
    assert disturbed.stdout.count("resumed at step") >= 2 * (len(kills) - 1)
    expected, found = (torch.load(tmp_path / name / "weights.pt") for name in ("undisturbed", "disturbed"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.long
def test_two_kills_change_nothing(tmp_path: Path) -> None:
    _trains_on_as_if_undisturbed(tmp_path, 8, [2, 5])


@pytest.mark.long
@pytest.mark.timeout(3 * PATIENCE_SECONDS)
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    chance = random.Random(1)
    _trains_on_as_if_undisturbed(tmp_path, 60, sorted(chance.sample(range(1, 58), 10)))


@pytest.mark.long
@pytest.mark.timeout(3 * PATIENCE_SECONDS)
@pytest.mark.parametrize("layout", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_twenty_kills_in_saves_of_sharded_models_change_nothing(tmp_path: Path, layout: str) -> None:
    chance = random.Random(2)
    flags = (*SHARDED, "--fsdp_state_dict_type", layout)
    _trains_on_as_if_undisturbed(tmp_path, 60, sorted(chance.sample(range(1, 58), 20)), flags)


def test_more_failures_than_restarts_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(9)")
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--max_restarts", "2", "fails.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert result.returncode == 9
    assert result.stderr.count("starting all again") == 2
