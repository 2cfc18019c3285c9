"""What an Accelerator adds to a training step: the original's and ours, on a model of one layer in one process.

Each worker takes a step with plain PyTorch and one with the prepared model in turns; what counts is the difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from interleaved import run, serve
from torch import nn

NAMES = ("accelerate 1.15", "accelerate_cpp")
MEASUREMENTS = ("added to a step", "added to a step within accumulate()")
STEPS = 300


def plain_step() -> Callable[[], None]:
    """A step of PyTorch alone."""
    model, batch = nn.Linear(1, 1), torch.ones(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepared_steps(package: str) -> dict[str, Callable[[], None]]:
    """The same through the ``Accelerator`` of ``package``, by measurement."""
    accelerator = __import__(package).Accelerator(cpu=True)
    model, batch = nn.Linear(1, 1), torch.ones(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))

    def step() -> None:
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()

    def step_within_accumulate() -> None:
        with accelerator.accumulate(model):
            step()

    return dict(zip(MEASUREMENTS, (step, step_within_accumulate), strict=True))


def worker(name: str) -> None:
    """The process of a contestant."""
    package = {NAMES[0]: "accelerate", NAMES[1]: "accelerate_cpp"}[name]
    plain, prepared = plain_step(), prepared_steps(package)

    def added(measurement: str) -> float:
        began = time.perf_counter()
        plain()
        between = time.perf_counter()
        prepared[measurement]()
        return time.perf_counter() - between - (between - began)

    serve(lambda measurement: [added(measurement) for _ in range(STEPS)])


if __name__ == "__main__":
    run(__doc__, worker, MEASUREMENTS, NAMES, processes=[1])
