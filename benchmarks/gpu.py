"""Steps and passes on one GPU: PyTorch alone, the original and ours; and what sums gradients there, in a group of one.

Every operation ends when the GPU has done it. The transformer is that of ``step.py``, with batches of 32 sequences.
Offloaded layers are 64 MB each, in memory that is not pinned; with 16384 rows a layer computes about as long as its
weights take to be copied. A group of one process sends nothing: its steps show what each way to sum costs besides.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from interleaved import Measurement, command_line, compare, seconds_of_each, serve
from step import transformer
from torch import nn
from workers import Contestant

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
SMALL = "step of a linear layer"
STEPS = {
    f"step of a transformer, {precision}{clips}": (precision, clips != "")
    for precision in DTYPES
    for clips in ("", ", clipping")
}
LAYERS, WIDTH = 16, 4096
OFFLOADED = {f"offloaded layer, {rows} row{'s'[: rows > 1]}": rows for rows in (1, 16384)}
IN_A_GROUP = ("group of one, bf16 model, clipping", "group of one, fp32 model, clipping")
ALONE = ("PyTorch", "accelerate 1.15", "accelerate_cpp")
AHEAD = "accelerate_cpp, copying ahead"
GROUPED = (
    "torch DDP over NCCL",
    "ours over NCCL",
    "ours over NCCL, kernels",
    "ours, NCCL itself",
    "ours, NCCL, kernels",
)

Step = Callable[[], object]


@contextmanager
def without_a_group() -> Iterator[None]:
    """Inside this block the environment describes no process group."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def model_of(measurement: str) -> tuple[nn.Module, torch.Tensor]:
    """The model and its batch, the same for all contestants."""
    torch.manual_seed(0)
    if measurement == SMALL:
        return nn.Linear(64, 64), torch.randn(8, 64, device="cuda")
    return transformer()[0], torch.randn(32, 32, 512, device="cuda")


def step_of_torch(measurement: str) -> Step:
    """A step of PyTorch alone."""
    precision, clips = STEPS.get(measurement, ("fp32", False))
    model, batch = model_of(measurement)
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def step() -> None:
        with torch.autocast("cuda", DTYPES[precision], enabled=precision != "fp32"):
            result = model(batch)
        scaler.scale(result.float().square().mean()).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def step_of_accelerator(package: Any, measurement: str) -> Step:
    """The same through an ``Accelerator``."""
    precision, clips = STEPS.get(measurement, ("fp32", False))
    importlib.import_module(f"{package.__name__}.state").AcceleratorState._reset_state(True)
    with without_a_group():
        accelerator = package.Accelerator(mixed_precision=PRECISIONS[precision])
    model, batch = model_of(measurement)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))

    def step() -> None:
        accelerator.backward(model(batch).square().mean())
        if clips:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def offloaded_pass(package: Any, rows: int) -> Step:
    """A pass through layers whose weights are in memory."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    weights = {name: torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for name in model.state_dict()}
    model = package.cpu_offload(model, torch.device("cuda", 0), state_dict=weights)
    data = torch.randn(rows, WIDTH, device="cuda")

    def forward() -> None:
        with torch.no_grad():
            model(data)

    return forward


def grouped_step(name: str, dtype: torch.dtype) -> Step:
    """A step whose gradients are summed over a group of one process, and then clipped."""
    from accelerate_cpp.comm.backend import register
    from accelerate_cpp.parallel.clipping import clip_grad_norm
    from accelerate_cpp.parallel.data_parallel import DataParallel, core_backend, device_group_maker

    if not dist.is_initialized():
        register()
        dist.init_process_group("cpu:shm,cuda:nccl")
    device = torch.device("cuda", 0)
    model, batch = model_of("")
    model, batch = model.to(device, dtype), batch.to(dtype)
    wrapped: nn.Module
    clip: Callable[..., Any]
    if name == GROUPED[0]:
        wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
        clip = nn.utils.clip_grad_norm_
    else:
        backend = core_backend()
        assert backend is not None
        make = device_group_maker(device, backend.timeout)
        options = {"device_kernels": "kernels" in name, "nccl": "over" not in name}
        wrapped = DataParallel(model, backend.communicator, backend.timeout, make_device_group=make, **options)
        clip = clip_grad_norm
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parameters = list(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        wrapped(batch).float().square().mean().backward()
        clip(parameters, 1.0)
        optimizer.step()

    return step


def prepared(contestant: str, measurement: str) -> Step:
    """What ``contestant`` does in ``measurement``."""
    if measurement in IN_A_GROUP:
        return grouped_step(contestant, torch.bfloat16 if "bf16" in measurement else torch.float32)
    if contestant == ALONE[0]:
        return step_of_torch(measurement)
    if contestant == ALONE[1]:
        import accelerate as package
    else:
        import accelerate_cpp as package
    if measurement in OFFLOADED:
        return offloaded_pass(package, OFFLOADED[measurement])
    return step_of_accelerator(package, measurement)


def worker(contestant: str) -> None:
    """The process of a contestant."""
    del os.environ["ACCELERATE_USE_CPU"]  # which workers are given
    if contestant == AHEAD:
        os.environ["ACCELERATE_CPP_OFFLOAD_WINDOW"] = "256MB"
    kept: dict[str, Step] = {}

    def measure(measurement: str) -> list[float]:
        if measurement not in kept:
            kept.clear()
            kept[measurement] = prepared(contestant, measurement)

        def once() -> None:
            kept[measurement]()
            torch.cuda.synchronize()

        return seconds_of_each(once, 3 if measurement in OFFLOADED else 30)

    serve(measure)
    if dist.is_initialized():
        dist.destroy_process_group()


def measurements(_: int) -> list[Measurement]:
    """All that there are."""
    alone = [Measurement(name, ALONE) for name in (SMALL, *STEPS)]
    offloaded = [Measurement(name, (*ALONE[1:], AHEAD)) for name in OFFLOADED]
    return [*alone, *offloaded, *(Measurement(name, GROUPED) for name in IN_A_GROUP)]


if __name__ == "__main__":
    contestants = [Contestant(name) for name in (*ALONE, AHEAD, *GROUPED)]
    parser = command_line(__doc__, contestants)
    parser.set_defaults(processes=[1])
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
    else:
        compare(arguments, contestants, measurements)
