"""What fp16 training adds to a step: un-scaling, the overflow check, clipping, and AdamW on 25 million parameters.

  torch            DDP over Gloo (one process: the model itself), torch.amp.GradScaler,
                   torch.nn.utils.clip_grad_norm_, AdamW(fused=True)
  accelerate_cpp   Accelerator(mixed_precision="fp16") with its clip_grad_norm_, the same AdamW

"gradients" is what lies between backward and the optimizer; "step" goes on to the end of ``optimizer.step``. The
backward pass, in which ours measures the gradients, is not part of either; "with backward" is all three.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from interleaved import run, serve
from torch import nn

NAMES = ("torch", "accelerate_cpp")
MEASUREMENTS = ("gradients", "step", "with backward")
SHAPES = [(512, 512)] * 64 + [(2048, 512)] * 8
REPETITIONS = 5

Tools = tuple[nn.Module, Callable[[torch.Tensor], None], Callable[[], object], Callable[[], object]]


class Weights(nn.Module):
    """25 million parameters whose gradients cost next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(shape) for shape in SHAPES)
        self.directions = [torch.randn(shape) for shape in SHAPES]

    def forward(self) -> torch.Tensor:
        """A loss whose gradients are the directions."""
        pairs = zip(self.parts, self.directions, strict=True)
        return torch.stack([torch.dot(part.view(-1), direction.view(-1)) for part, direction in pairs]).sum()


def torch_tools() -> Tools:
    """torch's own, as the original Accelerate uses them."""
    model: nn.Module = Weights()
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler("cpu")

    def backward(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(loss).backward()

    def clip() -> object:
        scaler.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    return model, backward, clip, step


def own_tools() -> Tools:
    """Those of the façade."""
    from accelerate_cpp import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    module = Weights()
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True))

    def backward(loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        accelerator.backward(loss)

    return model, backward, lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0), optimizer.step


def worker(name: str) -> None:
    """One process of a contestant."""
    model, backward, clip, step = {NAMES[0]: torch_tools, NAMES[1]: own_tools}[name]()

    def once(measurement: str) -> float:
        loss = model()
        began = time.perf_counter()
        backward(loss)
        arrived = time.perf_counter()
        clip()
        clipped = time.perf_counter()
        step()
        ended = time.perf_counter()
        ends = {MEASUREMENTS[0]: clipped - arrived, MEASUREMENTS[1]: ended - arrived, MEASUREMENTS[2]: ended - began}
        return ends[measurement]

    serve(lambda measurement: [once(measurement) for _ in range(REPETITIONS)])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(__doc__, worker, MEASUREMENTS, NAMES)
