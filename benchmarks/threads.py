"""Training steps on the CPU in fp32 and bf16, with one thread per process and with as many as there are cores.

The model is the transformer of ``step.py``, prepared by ours. ``accelerate-cpp launch`` divides the cores that
there really are (control group, affinity) by the processes of the machine, and gives each process as many threads.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from interleaved import run, seconds_of_each, serve
from step import WAYS, accelerated_step, transformer

PRECISIONS = {"fp32": "no", "bf16": "bf16"}
STEPS = 3


def thread_counts() -> dict[str, int]:
    """How many threads a process has, by measurement."""
    cores = len(os.sched_getaffinity(0))
    return {"1 thread": 1, f"{cores} threads": cores}


def worker(name: str) -> None:
    """One process of a contestant."""
    os.environ["ACCELERATE_MIXED_PRECISION"] = PRECISIONS[name]
    prepare = accelerated_step("accelerate_cpp")
    torch.manual_seed(0)
    model, batch = transformer()
    step = prepare(model, WAYS["transformer"])

    def measure(measurement: str) -> list[float]:
        torch.set_num_threads(thread_counts()[measurement])
        return seconds_of_each(lambda: step(batch), STEPS)

    serve(measure)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(__doc__, worker, list(thread_counts()), list(PRECISIONS), processes=[1, 2])
