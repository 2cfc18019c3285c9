"""A training step of sharded models among processes: torch's ways over Gloo, and ours.

The model is the transformer of 25 million parameters of ``benchmarks/step.py``, whose layers are the units. "alone" is
the limit: the processes do not communicate at all. Times are of the processor, as processes that wait leave it to
others on a machine with few cores.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from interleaved import run, serve
from step import transformer
from torch import nn

from accelerate_cpp.utils import FullyShardedDataParallelPlugin

NAMES = (
    "alone",
    "torch DDP over gloo",
    "torch FSDP2 over gloo",
    "torch FSDP2 over shm",
    "torch ZeroRedundancyOptimizer over gloo",
    "accelerate_cpp, FSDP2",
    "accelerate_cpp, FSDP2, weights once per host",
    "accelerate_cpp, ZeRO 1",
    "accelerate_cpp, ZeRO 2",
    "accelerate_cpp, ZeRO 3",
    "accelerate_cpp, data parallel",
)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
STEPS = 2  # per turn


def torch_step(backend: str | None, wrap: str) -> Callable[[str], Callable[[], None]]:
    """Steps in plain torch; ``wrap`` is how."""
    if backend is not None:
        from accelerate_cpp.comm.backend import register

        register()
        dist.init_process_group(backend)

    def prepare(optimizer: str) -> Callable[[], None]:
        torch.manual_seed(0)
        model, batch = transformer()
        if wrap == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for layer in model.layers:  # type: ignore[union-attr]
                fully_shard(layer)
            fully_shard(model)
        trained = nn.parallel.DistributedDataParallel(model) if wrap in ("ddp", "zero") else model
        make = OPTIMIZERS[optimizer]
        stepping: torch.optim.Optimizer
        if wrap == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            stepping = ZeroRedundancyOptimizer(model.parameters(), make, lr=1e-4)
        else:
            stepping = make(model.parameters(), lr=1e-4)

        def step() -> None:
            trained(batch).square().mean().backward()
            stepping.step()
            stepping.zero_grad()

        return step

    return prepare


def sharding(**options: Any) -> FullyShardedDataParallelPlugin:
    """A plugin whose units are the layers of the model."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        **options,
    )


def our_step(**options: Any) -> Callable[[str], Callable[[], None]]:
    """Steps through ``Accelerator``, which takes ``options``."""
    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True, **options)

    def prepare(optimizer: str) -> Callable[[], None]:
        torch.manual_seed(0)
        model, batch = transformer()
        trained, stepping = accelerator.prepare(model, OPTIMIZERS[optimizer](model.parameters(), lr=1e-4))

        def step() -> None:
            accelerator.backward(trained(batch).square().mean())
            stepping.step()
            stepping.zero_grad()

        return step

    return prepare


def worker(name: str) -> None:
    """One rank of a contestant."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    prepare = {
        NAMES[0]: lambda: torch_step(None, "none"),
        NAMES[1]: lambda: torch_step("gloo", "ddp"),
        NAMES[2]: lambda: torch_step("gloo", "fsdp"),
        NAMES[3]: lambda: torch_step("shm", "fsdp"),
        NAMES[4]: lambda: torch_step("gloo", "zero"),
        NAMES[5]: lambda: our_step(fsdp_plugin=sharding()),
        NAMES[6]: lambda: our_step(fsdp_plugin=sharding(weights_once_per_host=True)),
        NAMES[7]: lambda: our_step(fsdp_plugin=sharding(zero_stage=1)),
        NAMES[8]: lambda: our_step(fsdp_plugin=sharding(zero_stage=2)),
        NAMES[9]: lambda: our_step(fsdp_plugin=sharding(zero_stage=3)),
        NAMES[10]: lambda: our_step(),
    }[name]()
    serve_steps(prepare)


def serve_steps(prepare: Callable[[str], Callable[[], None]]) -> None:
    """Measures the processor time of steps with each optimizer, which ``prepare`` makes, until nobody asks any more."""
    prepared: dict[str, Callable[[], None]] = {}

    def measure(optimizer: str) -> list[float]:
        """Seconds of processor time of this process."""
        if optimizer not in prepared:
            prepared[optimizer] = prepare(optimizer)
        seconds = []
        for _ in range(STEPS):
            begin = time.process_time()
            prepared[optimizer]()
            seconds.append(time.process_time() - begin)
        return seconds

    serve(measure)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(__doc__, worker, list(OPTIMIZERS), NAMES)
