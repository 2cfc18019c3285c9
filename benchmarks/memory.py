"""The memory that a process needs while it trains: torch DDP over Gloo, the original Accelerate, and ours.

Counted is the proportional set size (PSS), in which shared memory counts once for all who share it. A thread samples it
during the steps; what counts is the largest sample, less what the process held before the model was made. The model is
the transformer of ``step.py``; torch's gradients are views of its buckets, which is where it needs least.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from interleaved import serve
from step import transformer
from torch import nn
from workers import Contestant, Group

NAMES = ("torch DDP over gloo", "accelerate 1.15", "accelerate_cpp", "alone")
STEPS = 6
SAMPLE_SECONDS = 0.005
PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def pss_bytes() -> int:
    """Of this process."""
    found = PSS.search(Path("/proc/self/smaps_rollup").read_bytes())
    assert found is not None
    return int(found[1]) << 10


def torch_step() -> Callable[[], None]:
    """Steps with torch's own wrapper."""
    dist.init_process_group("gloo")
    model, batch = transformer()
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return stepping(wrapped, torch.optim.SGD(model.parameters(), lr=1e-4), torch.Tensor.backward, batch)


def lone_step() -> Callable[[], None]:
    """Steps of processes that do not communicate."""
    model, batch = transformer()
    return stepping(model, torch.optim.SGD(model.parameters(), lr=1e-4), torch.Tensor.backward, batch)


def accelerated_step(package: str) -> Callable[[], None]:
    """Steps through the ``Accelerator`` of ``package``, with views of buckets where they are an option."""
    module = __import__(package)
    handlers = [module.DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = module.Accelerator(cpu=True, kwargs_handlers=handlers)
    model, batch = transformer()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    return stepping(model, optimizer, accelerator.backward, batch)


def stepping(
    model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[..., None], batch: torch.Tensor
) -> Callable[[], None]:
    """One step of training."""

    def step() -> None:
        backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def worker(name: str) -> None:
    """One rank of a contestant."""
    prepare = {
        NAMES[0]: torch_step,
        NAMES[1]: lambda: accelerated_step("accelerate"),
        NAMES[2]: lambda: accelerated_step("accelerate_cpp"),
        NAMES[3]: lone_step,
    }[name]

    def peak(_: str) -> list[float]:
        before = pss_bytes()
        step = prepare()
        samples, over = [before], threading.Event()

        def sample() -> None:
            while not over.wait(SAMPLE_SECONDS):
                samples.append(pss_bytes())

        sampler = threading.Thread(target=sample)
        sampler.start()
        for _ in range(STEPS):
            step()
        over.set()
        sampler.join()
        return [(max(samples) - before) / 1e6]  # serve() speaks of seconds, and hands over millionths

    serve(peak)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="of each contestant")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker)
    print(f"{'':24} {'peak of rank 0':>16} {'fraction':>9}")
    first = None
    for name in NAMES:
        group = Group(sys.argv[0], Contestant(name), arguments.processes)
        try:
            bytes_needed = group.turn("peak")["median_us"]
            group.end()
        finally:
            group.kill()
        first = first or bytes_needed
        print(f"{name:24} {bytes_needed / (1 << 20):12.1f} MiB {bytes_needed / first:9.2f}", flush=True)


if __name__ == "__main__":
    main()
