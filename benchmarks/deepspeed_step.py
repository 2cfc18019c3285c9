"""A training step through engines of DeepSpeed, its collectives over shared memory and over Gloo.

The model is the transformer of 25 million parameters of ``benchmarks/step.py``. "torch alone" is the limit: plain
torch, whose processes do not communicate at all. Times are of the processor, as processes that wait leave it to others
on a machine with few cores.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from interleaved import run, serve
from step import transformer

NAMES = (
    "torch alone",
    *(f"stage {stage} over {backend}" for stage in (0, 1, 2, 3) for backend in ("gloo", "shm")),
    "accelerate_cpp, ZeRO 2",
)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
STEPS = 2  # per turn


def torch_step(optimizer: str) -> Callable[[], None]:
    """Steps in plain torch on one process."""
    torch.manual_seed(0)
    model, batch = transformer()
    stepping = OPTIMIZERS[optimizer](model.parameters(), lr=1e-4)

    def step() -> None:
        model(batch).square().mean().backward()
        stepping.step()
        stepping.zero_grad()

    return step


def engine_step(stage: int, backend: str) -> Callable[[str], Callable[[], None]]:
    """Steps of engines, through ``Accelerator``."""
    logging.disable(logging.INFO)
    from accelerate_cpp import Accelerator, DeepSpeedPlugin
    from accelerate_cpp.utils import InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.0)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)]
    )

    def prepare(optimizer: str) -> Callable[[], None]:
        torch.manual_seed(0)
        model, batch = transformer()
        engine, stepping = accelerator.prepare(model, OPTIMIZERS[optimizer](model.parameters(), lr=1e-4))

        def step() -> None:
            accelerator.backward(engine(batch).square().mean())
            stepping.step()
            stepping.zero_grad()

        return step

    return prepare


def own_zero_step() -> Callable[[str], Callable[[], None]]:
    """Steps of this package's own ZeRO 2."""
    from parallel import our_step, sharding

    return our_step(sharding(zero_stage=2))


def worker(name: str) -> None:
    """One rank of a contestant."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    if name == NAMES[0]:
        prepare = torch_step
    elif name == NAMES[-1]:
        prepare = own_zero_step()
    else:
        _, stage, _, backend = name.split()
        prepare = engine_step(int(stage), backend)
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
