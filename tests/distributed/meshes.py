"""A small causal transformer, trained on a mesh by an Accelerator and as a whole by plain torch."""

from __future__ import annotations

import math
from typing import Any

# Torch is imported inside the functions: the process that collects the tests needs none of it.

ROWS, TOKENS, STEPS = 8, 8, 10


def block_of(width: int, heads: int, kv_heads: int) -> Any:
    """A causal transformer block with usual names, whose attention has an attribute for its heads."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width // heads
            self.q_proj = nn.Linear(width, width)
            self.k_proj = nn.Linear(width, kv_heads * self.head_dim)
            self.v_proj = nn.Linear(width, kv_heads * self.head_dim)
            self.o_proj = nn.Linear(width, width)

        def forward(self, hidden: Any) -> Any:
            def cut(layer: Any, number: int) -> Any:
                return layer(hidden).view(*hidden.shape[:2], number, self.head_dim).transpose(1, 2)

            queries = cut(self.q_proj, self.num_heads)
            keys, values = cut(self.k_proj, self.num_kv_heads), cut(self.v_proj, self.num_kv_heads)
            found = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            return self.o_proj(found.transpose(1, 2).flatten(2))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm = Attention(), nn.LayerNorm(width)
            self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, hidden: Any) -> Any:
            hidden = hidden + self.attention(self.norm(hidden))
            return hidden + self.fc2(torch.tanh(self.fc1(hidden)))

    return Block()


def network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 16),
        block_of(16, 4, 2),
        block_of(16, 2, 2),
        nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 2)),
    )


def accelerator(
    sizes: dict[str, int],
    plan: Any = None,
    cuts: bool = False,
    attention: str | None = None,
    stages: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """A new one; ``plan`` and ``cuts`` are of tensor parallelism, ``attention`` of context parallelism."""
    from accelerate_cpp import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate_cpp.state import AcceleratorState, GradientState
    from accelerate_cpp.utils import PipelineParallelConfig, TorchContextParallelConfig, TorchTensorParallelConfig

    AcceleratorState._reset_state()
    GradientState._reset_state()
    handlers: dict[str, Any] = {}
    if "tp_size" in sizes:
        handlers["tp_handler"] = TorchTensorParallelConfig(plan=plan, sequence_parallel=cuts)
    if "pp_size" in sizes:
        handlers["pp_handler"] = PipelineParallelConfig(**(stages or {}))
    if "cp_size" in sizes:
        handlers["cp_handler"] = TorchContextParallelConfig(cp_comm_strategy=attention)
    config = ParallelismConfig(**sizes, **handlers)  # type: ignore[arg-type]
    if "dp_shard_size" in sizes:
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
    return Accelerator(cpu=True, parallelism_config=config, **arguments)


def sgd(model: Any) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(begin: int = 0, steps: int = STEPS) -> list[tuple[Any, Any]]:
    """Those of all processes together."""
    import torch

    generators = [torch.Generator().manual_seed(begin + number) for number in range(steps)]
    return [(torch.randn(ROWS, TOKENS, 3, generator=g), torch.randn(ROWS, TOKENS, 2, generator=g)) for g in generators]


def share_of(run: Any, rows: Any) -> Any:
    mesh = run._session.topology.mesh
    return rows.tensor_split(mesh.data_size)[mesh.data_rank]


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    return (model(inputs) - targets).square().mean()


def one_process(model: Any, data: list[Any], optimizer: Any = None, max_norm: float = 1e9) -> tuple[list[Any], Any]:
    """Plain torch: losses and norms of the gradients."""
    import torch

    optimizer = optimizer or sgd(model)
    found = []
    for batch in data:
        loss = loss_of(model, *batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm.item()))
    return found, optimizer


def several(run: Any, model: Any, optimizer: Any, data: list[Any], max_norm: float = 1e9) -> list[Any]:
    """The same on all processes."""
    found = []
    for inputs, targets in data:
        buffers = [share_of(run, rows).clone() for rows in (inputs, targets)]
        with run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1]):
            loss = loss_of(model, *buffers)
        run.backward(loss)
        norm = run.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((run.reduce(loss.detach(), "mean").item(), norm.item()))
    return found


def same(found: list[Any], expected: list[Any]) -> None:
    import torch

    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-7)


def same_weights(run: Any, model: Any, expected: Any) -> None:
    import torch

    state = run.get_state_dict(model)
    if run.is_main_process:
        assert state.keys() == expected.state_dict().keys()
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(
                state[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


def num_processes(sizes: dict[str, int]) -> int:
    return math.prod(sizes.values())
