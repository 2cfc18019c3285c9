"""``accelerate-cpp launch --alias``: scripts that were written for the original run on this package unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = """
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

def collate(rows):
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

def main():
    set_seed(42)
    accelerator = Accelerator(cpu=True)
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    data = torch.utils.data.TensorDataset(inputs, 3 * inputs + 1)
    loader = torch.utils.data.DataLoader(
        data, batch_size=8, shuffle=True, num_workers=1, multiprocessing_context="spawn", collate_fn=collate
    )
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=40)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
    loss = accelerator.gather(loss.detach().reshape(1)).mean().item()
    print(type(accelerator).__module__, accelerator.process_index, accelerator.num_processes, loss < 0.1)
    accelerator.end_training()

if __name__ == "__main__":
    main()
"""


@pytest.mark.long
def test_script_of_the_tutorial_trains_unchanged(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TUTORIAL)
    command = [sys.executable, "-m", "accelerate_cpp.commands.launch", "--alias", "--cpu", "--num_processes", "2"]
    result = subprocess.run([*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"accelerate_cpp.accelerator {rank} 2 True" for rank in range(2)]
