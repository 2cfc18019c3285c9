"""A process such as a notebook's kernel, which starts workers again and again, and is measured after each time.

Usage: ``python kernel.py FOLDER TIMES LEAK``. ``LEAK`` is ``descriptors`` (one in 4 launches) or ``nothing``.
"""

from __future__ import annotations

import gc
import os
import sys
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


def main(folder: Path, times: int, leak: str) -> None:
    for launch in range(times):
        begin = time.perf_counter()
        first, second = notebook_launcher(train, (launch,), num_processes=PROCESSES)
        assert first == second, f"launch {launch}: rank 0 has weights of sum {first}, rank 1 of {second}"
        if leak == "descriptors" and launch % 4 == 3:
            os.open(os.devnull, os.O_RDONLY)
        gc.collect()
        facts = {"operations": launch + 1, "steps": launch + 1, "step_seconds": time.perf_counter() - begin}
        if not stand_still(folder, "kernel", launch, **facts):
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
