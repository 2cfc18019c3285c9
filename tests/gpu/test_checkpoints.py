"""Training on a GPU continues from a checkpoint as if it had not been interrupted, its random numbers included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate_cpp import Accelerator
from processes import run_processes


def trained(folder: str, before: int, after: int, resumes: bool = False) -> list[float]:
    """Losses of ``after`` steps, which draw numbers on the GPU, and which follow ``before`` steps and a checkpoint."""
    accelerator = Accelerator(mixed_precision="fp16")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    def steps(count: int) -> list[float]:
        losses = []
        for _ in range(count):
            data = torch.randn(32, 16, device=accelerator.device)
            loss = (model(data) - data.sum(dim=1, keepdim=True)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    if resumes:
        accelerator.load_state(folder)
    else:
        steps(before)
        accelerator.save_state(folder)
    return steps(after)


def test_another_process_continues_to_the_last_bit(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    (expected,) = run_processes(trained, 1, folder, 4, 6)
    (resumed,) = run_processes(trained, 1, folder, 0, 6, True)
    assert resumed == expected


def test_a_checkpoint_holds_the_state_of_the_generator_of_the_gpu(tmp_path: Path) -> None:
    accelerator = Accelerator()
    torch.cuda.manual_seed(11)
    accelerator.save_state(str(tmp_path / "state"))
    saved: Any = torch.load(tmp_path / "state" / "random_states_0.pkl", weights_only=False)
    states = torch.cuda.get_rng_state_all()
    assert len(saved["torch_cuda_manual_seed"]) == len(states)
    for own, expected in zip(saved["torch_cuda_manual_seed"], states, strict=True):
        assert torch.equal(own, expected)
    drawn = torch.randn(5, device="cuda")
    torch.randn(100, device="cuda")
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(torch.randn(5, device="cuda"), drawn)
    assert not torch.equal(torch.randn(5, device="cuda"), drawn)
