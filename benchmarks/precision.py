"""What fp16 training adds to a step: un-scaling, the overflow check, clipping, and AdamW on 25 million parameters.

  torch            torch.amp.GradScaler, torch.nn.utils.clip_grad_norm_, AdamW(fused=True)
  accelerate_cpp   GradScaler and clipping of accelerate_cpp, the same AdamW

"gradients" is what lies between backward and the optimizer; "step" goes on to the end of ``optimizer.step``. Gradients
are put in place before the clock starts. Several processes work at the same time and do not talk to each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from interleaved import Measurement, command_line, compare, serve
from workers import Contestant

NAMES = ("torch", "accelerate_cpp")
MEASUREMENTS = ("gradients", "step")
SHAPES = [(512, 512)] * 64 + [(2048, 512)] * 8
REPETITIONS = 5


def torch_tools() -> tuple[torch.amp.GradScaler, Callable[..., object]]:
    """torch's own, as the original Accelerate uses them."""
    scaler = torch.amp.GradScaler("cpu")

    def clip(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> object:
        scaler.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    return scaler, clip


def own_tools() -> tuple[torch.amp.GradScaler, Callable[..., object]]:
    """Those behind ``Accelerator.clip_grad_norm_``."""
    from accelerate_cpp.parallel.clipping import clip_grad_norm
    from accelerate_cpp.precision.grad_scaler import GradScaler, unscale_all

    scaler = GradScaler()

    def clip(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> object:
        return clip_grad_norm(parameters, 1.0, known_squares=unscale_all(scaler, [optimizer]))

    return scaler, clip


def worker(name: str) -> None:
    """One process of a contestant."""
    scaler, clip = {NAMES[0]: torch_tools, NAMES[1]: own_tools}[name]()
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    gradients = [torch.randn(shape) for shape in SHAPES]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def once(measurement: str) -> float:
        scaled = scaler.scale(torch.ones(()))
        for parameter, gradient in zip(parameters, gradients, strict=True):
            torch.mul(gradient, scaled, out=parameter.grad)
        started = time.perf_counter()
        clip(parameters, optimizer)
        between = time.perf_counter()
        scaler.step(optimizer)
        ended = time.perf_counter()
        scaler.update()
        return (between if measurement == MEASUREMENTS[0] else ended) - started

    serve(lambda measurement: [once(measurement) for _ in range(REPETITIONS)])


def main() -> None:
    contestants = [Contestant(name) for name in NAMES]
    arguments = command_line(__doc__, contestants).parse_args()
    if arguments.worker:
        worker(arguments.worker)
    else:
        compare(arguments, contestants, lambda _: [Measurement(name, NAMES) for name in MEASUREMENTS])


if __name__ == "__main__":
    main()
