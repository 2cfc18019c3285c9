"""Trains the digits on whatever device there is, saves, goes on, goes back and goes on again; prints what it saw.

Arguments: precision, folder for checkpoints, batch size of each process.
"""

from __future__ import annotations

import json
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate_cpp import Accelerator
from accelerate_cpp.utils import set_seed


def main(precision: str, folder: str, batch_size: int) -> None:
    accelerator = Accelerator(mixed_precision=precision)
    set_seed(0)
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data[:640], dtype=torch.float32) / 16, torch.tensor(digits.target[:640])
    # Dropout only where one process draws, as processes draw different numbers.
    layers = [nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1 if accelerator.num_processes == 1 else 0), nn.Linear(32, 10)]
    model = nn.Sequential(*layers)
    if accelerator.num_processes > 1 or batch_size > 64:
        model[2] = nn.Identity()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> list[float]:
        seen = []
        for batch, wanted in loader:
            loss = nn.functional.cross_entropy(model(batch), wanted)
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((accelerator.reduce(loss.detach(), "mean").item(), float(norm)))
        return [number for pair in seen for number in pair]

    first = epoch()
    accelerator.save_state(folder)
    after = epoch()
    accelerator.load_state(folder)
    again = epoch()
    gathered = accelerator.gather(torch.full((1,), float(accelerator.process_index), device=accelerator.device))
    report = {
        "device": str(accelerator.device),
        "parameters": sorted({str(parameter.device) for parameter in model.parameters()}),
        "type": str(accelerator.distributed_type.value),
        "backend": accelerator.state.backend,
        "computes_in": str(model(inputs[:2].to(accelerator.device)).dtype),
        "first": first,
        "after": after,
        "again": again,
        "gathered": gathered.tolist(),
    }
    print(f"REPORT {accelerator.process_index} {json.dumps(report)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
