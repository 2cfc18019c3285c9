"""What a cell of a notebook does whose kernel starts workers again and again; it is measured after each time."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import torch
import torch._dynamo  # which optimizers load: workers then have it from the kernel

from accelerate_cpp import Accelerator, notebook_launcher
from quiet import stand_still

PROCESSES, STEPS = 2, 5


def train(seed: int) -> float:
    """What a cell trains: returns the sum of the weights, which is the same on all ranks."""
    run = Accelerator(cpu=True)
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        run.backward(model(torch.randn(4, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return float(model.module.weight.detach().sum())


def main(folder: str, times: int, leak: str) -> None:
    """Starts workers ``times`` times. ``leak`` is ``descriptors`` (one in 4 launches) or ``nothing``."""
    for launch in range(times):
        begin = time.perf_counter()
        first, second = notebook_launcher(train, (launch,), num_processes=PROCESSES)
        assert first == second, f"launch {launch}: rank 0 has weights of sum {first}, rank 1 of {second}"
        if leak == "descriptors" and launch % 4 == 3:
            os.open(os.devnull, os.O_RDONLY)
        gc.collect()
        facts = {"operations": launch + 1, "steps": launch + 1, "step_seconds": time.perf_counter() - begin}
        if not stand_still(Path(folder), "kernel", launch, **facts):
            return
