"""A training step among processes: torch DDP over Gloo, the original Accelerate, torch DDP over shm, and ours.

The models are the digits network of ``examples/digits.py``, a perceptron of 200 tensors with 10,000 elements each and a
transformer of 25 million parameters. Batches are random and small, so that communication shows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from interleaved import Measurement, command_line, compare, serve
from torch import nn
from workers import Contestant

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

NAMES = ("torch DDP over gloo", "accelerate 1.15", "torch DDP over shm", "accelerate_cpp")
STEPS_PER_TURN = {"digits": 20, "perceptron": 6, "transformer": 2}


def digits() -> tuple[nn.Module, torch.Tensor]:
    """The example's network and 32 images per process."""
    from digits import build_model

    return build_model(), torch.randn(32, 1, 8, 8)


def perceptron() -> tuple[nn.Module, torch.Tensor]:
    """200 weights of 100 x 100 and 16 rows per process."""
    layers = [layer for _ in range(200) for layer in (nn.Linear(100, 100, bias=False), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(16, 100)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """8 encoder layers of width 512 and 4 sequences of 32 positions per process."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), torch.randn(4, 32, 512)


MODELS = {"digits": digits, "perceptron": perceptron, "transformer": transformer}


def torch_step(backend: str) -> Callable[[nn.Module], Callable[[torch.Tensor], None]]:
    """Steps with torch's own wrapper over ``backend``."""
    from accelerate_cpp.comm.backend import register

    register()
    dist.init_process_group(backend)

    def prepare(model: nn.Module) -> Callable[[torch.Tensor], None]:
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            wrapped(batch).square().mean().backward()
            optimizer.step()

        return step

    return prepare


def accelerated_step(package: str) -> Callable[[nn.Module], Callable[[torch.Tensor], None]]:
    """Steps through the ``Accelerator`` of ``package``."""
    accelerator = __import__(package).Accelerator(cpu=True)

    def prepare(model: nn.Module) -> Callable[[torch.Tensor], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        wrapped, optimizer = accelerator.prepare(model, optimizer)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            accelerator.backward(wrapped(batch).square().mean())
            optimizer.step()

        return step

    return prepare


def worker(name: str) -> None:
    """One rank of a contestant."""
    prepare = {
        NAMES[0]: lambda: torch_step("gloo"),
        NAMES[1]: lambda: accelerated_step("accelerate"),
        NAMES[2]: lambda: torch_step("shm"),
        NAMES[3]: lambda: accelerated_step("accelerate_cpp"),
    }[name]()
    prepared: dict[str, tuple[Callable[[torch.Tensor], None], torch.Tensor]] = {}

    def measure(model_name: str) -> list[float]:
        if model_name not in prepared:
            torch.manual_seed(0)
            model, batch = MODELS[model_name]()
            prepared[model_name] = (prepare(model), batch)
        step, batch = prepared[model_name]
        seconds = []
        for _ in range(STEPS_PER_TURN[model_name]):
            started = time.perf_counter()
            step(batch)
            seconds.append(time.perf_counter() - started)
        return seconds

    serve(measure)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    contestants = [Contestant(name) for name in NAMES]
    arguments = command_line(__doc__, contestants).parse_args()
    if arguments.worker:
        worker(arguments.worker)
    else:
        compare(arguments, contestants, lambda _: [Measurement(name, NAMES) for name in MODELS])


if __name__ == "__main__":
    main()
