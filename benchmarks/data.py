"""Batches on their way through an Accelerator: the original's and ours, among processes on the CPU.

Gathered is a nested batch of 20 small tensors of two dtypes, and a short list of objects; sent to a device a nested
batch of 500 tensors. The loaders read a data set in memory; theirs is the time of one batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from interleaved import run, seconds_of_each, serve
from torch.utils.data import DataLoader

NAMES = ("accelerate 1.15", "accelerate_cpp")
PACKAGES = dict(zip(NAMES, ("accelerate", "accelerate_cpp"), strict=True))
CALLS_PER_TURN = {
    "gather_for_metrics, 20 tensors": 50,
    "gather_object": 100,
    "send_to_device, 500 tensors": 100,
    "sharded loader, one batch": 500,
    "dispatcher, one batch": 200,
}
ROWS, BATCH_SIZE = 8, 4


def nested(tensors: int) -> dict[str, Any]:
    """Half of the tensors, floats, in a list and half, integers, in a dictionary."""
    half = tensors // 2
    return {
        "floats": [torch.ones(ROWS, 4) for _ in range(half)],
        "integers": {str(i): torch.ones(ROWS, dtype=torch.int64) for i in range(half)},
    }


def endless(loader: Any) -> Iterator[Any]:
    """The batches of pass after pass."""
    while True:
        yield from loader


def calls(package: str) -> dict[str, Callable[[], object]]:
    """What is measured, by its name, with the ``Accelerator`` of ``package``."""
    accelerate, utils = importlib.import_module(package), importlib.import_module(f"{package}.utils")
    accelerator = accelerate.Accelerator(cpu=True)
    dispatching = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True)
    )
    samples = list(torch.arange(4000))
    sharded = endless(accelerator.prepare(DataLoader(samples, batch_size=BATCH_SIZE)))
    dispatched = endless(dispatching.prepare(DataLoader(samples, batch_size=BATCH_SIZE)))
    batch, objects, large = nested(20), ["a", 1, {"b": 2.0}], nested(500)
    measured: tuple[Callable[[], object], ...] = (
        lambda: accelerator.gather_for_metrics(batch),
        lambda: utils.gather_object(objects),
        lambda: utils.send_to_device(large, accelerator.device),
        lambda: next(sharded),
        lambda: next(dispatched),
    )
    return dict(zip(CALLS_PER_TURN, measured, strict=True))


def worker(name: str) -> None:
    """One rank of a contestant."""
    by_name = calls(PACKAGES[name])
    serve(lambda measurement: seconds_of_each(by_name[measurement], CALLS_PER_TURN[measurement]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(__doc__, worker, list(CALLS_PER_TURN), NAMES)
