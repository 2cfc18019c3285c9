"""A training step of a model whose layers, sequences or stages are split among processes, over Gloo and over shm.

The model is a causal transformer of 8 blocks of width 512 (25 million parameters), with a sequence of 512 tokens, where
computing counts, and of 8, where waiting does. What is split, and how, is the same over both backends. For layers that
are split, torch's own tensor parallelism takes the same steps over Gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from interleaved import Measurement, command_line, compare, seconds_of_each, serve
from torch import nn
from torch.nn import functional
from workers import Contestant

WIDTH, HEADS, BLOCKS = 512, 8, 8
TOKENS = {"512 tokens": 512, "8 tokens": 8}
STEPS = {"512 tokens": 1, "8 tokens": 4}  # per turn
WAYS = ("tensor parallel", "sequence parallel", "ring attention", "Ulysses", "pipeline")
OF_TORCH = "torch's tensor parallel over gloo"
NAMES = (*(f"{way} over {backend}" for way in WAYS for backend in ("gloo", "shm")), OF_TORCH)


class Block(nn.Module):
    """Attention and feed-forward layers under usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        added: torch.Tensor = self.fc2(functional.gelu(self.fc1(self.norm2(hidden))))
        return hidden + added


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        parts = [layer(hidden) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        parts = [part.unflatten(-1, (self.num_heads, WIDTH // HEADS)).transpose(1, 2) for part in parts]
        found = functional.scaled_dot_product_attention(*parts, is_causal=True)
        result: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return result


def square(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def mesh_of(way: str, processes: int) -> dict[str, Any]:
    """The sizes and options of a ``ParallelismConfig``."""
    from accelerate_cpp.utils import PipelineParallelConfig, TorchContextParallelConfig, TorchTensorParallelConfig

    if way == "pipeline":
        return {"pp_size": processes, "pp_handler": PipelineParallelConfig(micro_batches=2 * processes)}
    if way in ("ring attention", "Ulysses"):
        strategy = "alltoall" if way == "ring attention" else "ulysses"
        return {"cp_size": processes, "cp_handler": TorchContextParallelConfig(cp_comm_strategy=strategy)}
    layers = TorchTensorParallelConfig(sequence_parallel=way == "sequence parallel")
    return {"tp_size": processes, "tp_handler": layers}


def steps_of(way: str, backend: str) -> Callable[[int], Callable[[], None]]:
    """Steps through ``Accelerator``, for a number of tokens."""
    from accelerate_cpp import Accelerator, ParallelismConfig
    from accelerate_cpp.utils import InitProcessGroupKwargs

    config = ParallelismConfig(**mesh_of(way, int(os.environ["WORLD_SIZE"])))
    group = InitProcessGroupKwargs(backend=backend)
    accelerator = Accelerator(cpu=True, parallelism_config=config, kwargs_handlers=[group])
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))

    def prepare(tokens: int) -> Callable[[], None]:
        batch = torch.randn(4 if way == "pipeline" else 1, tokens, WIDTH)

        def step() -> None:
            with accelerator.maybe_context_parallel(buffers=[batch], buffer_seq_dims=[1]):
                accelerator.train_batch(batch, square)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def steps_of_torch() -> Callable[[int], Callable[[], None]]:
    """The same steps with ``parallelize_module`` and plain torch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = dict.fromkeys(("attention.q_proj", "attention.k_proj", "attention.v_proj", "fc1"), ColwiseParallel())
    plan: Any = columns | dict.fromkeys(("attention.o_proj", "fc2"), RowwiseParallel())
    for block in model:
        parallelize_module(block, mesh, plan)
        block.attention.num_heads //= dist.get_world_size()  # type: ignore[union-attr, operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def prepare(tokens: int) -> Callable[[], None]:
        batch = torch.randn(1, tokens, WIDTH)

        def step() -> None:
            square(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return prepare


def worker(name: str) -> None:
    """One rank of a contestant."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    way, _, backend = name.partition(" over ")
    prepare = steps_of_torch() if name == OF_TORCH else steps_of(way, backend)
    prepared: dict[str, Callable[[], None]] = {}

    def measure(measurement: str) -> list[float]:
        tokens = measurement.partition(": ")[2]
        if measurement not in prepared:
            prepared[measurement] = prepare(TOKENS[tokens])
        return seconds_of_each(prepared[measurement], STEPS[tokens])

    serve(measure)
    dist.destroy_process_group()


def measurements(_: int) -> list[Measurement]:
    """Each way by itself, over both backends."""
    return [
        Measurement(
            f"{way}: {tokens}",
            (f"{way} over gloo", f"{way} over shm", *((OF_TORCH,) if way == "tensor parallel" else ())),
        )
        for way in WAYS
        for tokens in TOKENS
    ]


if __name__ == "__main__":
    contestants = [Contestant(name) for name in NAMES]
    parser = command_line(__doc__, contestants)
    parser.set_defaults(processes=[2])
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
    else:
        compare(arguments, contestants, measurements, least_processes=2)
