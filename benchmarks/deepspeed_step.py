"""A training step through engines of DeepSpeed, its collectives over shared memory and over Gloo.

The model is the transformer of 25 million parameters of ``benchmarks/step.py``. "torch alone" is the limit: plain
torch, whose processes do not communicate at all. Times are of the processor, as processes that wait leave it to others
on a machine with few cores.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from interleaved import run
from parallel import OPTIMIZERS, our_step, serve_steps, sharding, torch_step

NAMES = (
    "torch alone",
    *(f"stage {stage} over {backend}" for stage in (0, 1, 2, 3) for backend in ("gloo", "shm")),
    "accelerate_cpp, ZeRO 2",
)


def engine_step(stage: int, backend: str) -> Callable[[str], Callable[[], None]]:
    """Steps of engines, through ``Accelerator``."""
    logging.disable(logging.INFO)
    from accelerate_cpp import DeepSpeedPlugin
    from accelerate_cpp.utils import InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.0)
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    group = InitProcessGroupKwargs(backend=backend)
    return our_step(deepspeed_plugin=plugin, kwargs_handlers=[group])


def worker(name: str) -> None:
    """One rank of a contestant."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    if name == NAMES[0]:
        prepare = torch_step(None, "none")
    elif name == NAMES[-1]:
        prepare = our_step(fsdp_plugin=sharding(zero_stage=2))
    else:
        _, stage, _, backend = name.split()
        prepare = engine_step(int(stage), backend)
    serve_steps(prepare)


if __name__ == "__main__":
    run(__doc__, worker, list(OPTIMIZERS), NAMES)
