"""What an Accelerator adds to a training step and to the start: the original's and ours, in one process.

Each worker takes a step of a model of one layer with plain PyTorch and one with the prepared model in turns; what
counts is the difference. An import takes place in a process of its own, behind that of torch. This package loads names
when they are first used, so that both are measured: the import of the package, and that of its ``Accelerator``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from interleaved import run, serve
from torch import nn

NAMES = ("accelerate 1.15", "accelerate_cpp")
MEASUREMENTS = ("added to a step", "added to a step within accumulate()")
STEPS = 300
IMPORTS = {
    "import beyond torch": "import {}",
    "import of Accelerator beyond torch": "from {} import Accelerator",
}


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


def seconds_of_import(statement: str) -> float:
    """How long ``statement`` takes in a process that has imported torch.

    Compiled modules are kept, as where packages are installed: the turn that does not count compiles them. Torch would
    load the backend of this package, and some of it with that.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    script = f"import time, torch; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout)


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

    def measure(measurement: str) -> list[float]:
        if measurement in IMPORTS:
            return [seconds_of_import(IMPORTS[measurement].format(package))]
        return [added(measurement) for _ in range(STEPS)]

    serve(measure)


if __name__ == "__main__":
    run(__doc__, worker, (*MEASUREMENTS, *IMPORTS), NAMES, processes=[1])
