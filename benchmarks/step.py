"""A training step among processes: torch DDP over Gloo, the original Accelerate, torch DDP over shm, and ours.

The models are the digits network of ``examples/digits.py``, a perceptron of 200 tensors with 10,000 elements each and a
transformer of 25 million parameters, which is also trained with clipping, and with 4 micro-batches per step. Batches
are random and small, so that communication shows. "alone" is the limit: the processes do not communicate at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from interleaved import run, seconds_of_each, serve
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

NAMES = ("torch DDP over gloo", "accelerate 1.15", "torch DDP over shm", "accelerate_cpp", "alone")


@dataclass(frozen=True)
class Way:
    """How a model is trained."""

    model: str
    steps_per_turn: int
    clips: bool = False
    micro_batches: int = 1


WAYS = {
    "digits": Way("digits", 20),
    "perceptron": Way("perceptron", 6),
    "transformer": Way("transformer", 2),
    "transformer, clipping": Way("transformer", 2, clips=True),
    "transformer, 4 micro-batches": Way("transformer", 1, micro_batches=4),
}
Prepare = Callable[[nn.Module, Way], Callable[[torch.Tensor], None]]


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


def torch_step(backend: str | None) -> Prepare:
    """Steps with torch's own wrapper over ``backend``; without one, the model by itself."""
    if backend is not None:
        from accelerate_cpp.comm.backend import register

        register()
        dist.init_process_group(backend)

    def prepare(model: nn.Module, way: Way) -> Callable[[torch.Tensor], None]:
        ddp = None if backend is None else nn.parallel.DistributedDataParallel(model)
        wrapped, local = (model, nullcontext) if ddp is None else (ddp, ddp.no_sync)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def step(batch: torch.Tensor) -> None:
            optimizer.zero_grad()
            for micro_batch in range(way.micro_batches):
                with nullcontext() if micro_batch == way.micro_batches - 1 else local():
                    (wrapped(batch).square().mean() / way.micro_batches).backward()
            if way.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return step

    return prepare


def accelerated_step(package: str) -> Prepare:
    """Steps through the ``Accelerator`` of ``package``."""
    accelerator = __import__(package).Accelerator(cpu=True)

    def prepare(model: nn.Module, way: Way) -> Callable[[torch.Tensor], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        wrapped, optimizer = accelerator.prepare(model, optimizer)

        def step(batch: torch.Tensor) -> None:
            accelerator.gradient_accumulation_steps = way.micro_batches
            for _ in range(way.micro_batches):
                with accelerator.accumulate(wrapped):
                    accelerator.backward(wrapped(batch).square().mean())
                    if way.clips:
                        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

        return step

    return prepare


def worker(name: str) -> None:
    """One rank of a contestant."""
    prepare = {
        NAMES[0]: lambda: torch_step("gloo"),
        NAMES[1]: lambda: accelerated_step("accelerate"),
        NAMES[2]: lambda: torch_step("shm"),
        NAMES[3]: lambda: accelerated_step("accelerate_cpp"),
        NAMES[4]: lambda: torch_step(None),
    }[name]()
    prepared: dict[str, tuple[Callable[[torch.Tensor], None], torch.Tensor]] = {}

    def measure(measurement: str) -> list[float]:
        way = WAYS[measurement]
        if measurement not in prepared:
            torch.manual_seed(0)
            model, batch = MODELS[way.model]()
            prepared[measurement] = (prepare(model, way), batch)
        step, batch = prepared[measurement]
        return seconds_of_each(lambda: step(batch), way.steps_per_turn)

    serve(measure)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run(__doc__, worker, list(WAYS), NAMES)
