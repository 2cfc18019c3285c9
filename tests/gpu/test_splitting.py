"""Models and sequences that are split over two processes of one GPU, whose tensors Gloo carries.

What is expected comes from one process on the GPU, of torch alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own.

ON_ONE_GPU = {"ACCELERATE_TORCH_DEVICE": "cuda:0"}


def attention(strategy: str, causal: bool, dtype_name: str) -> list[float]:
    """How far output and gradients of split attention are from those in fp64, relative to how far torch's are."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    from accelerate_cpp.parallel.context.context import ContextParallel

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:gloo")
    context = ContextParallel(dist.group.WORLD, strategy)
    dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(2, 4, 256, 64, generator=generator).to("cuda", dtype) for _ in range(4)]
    of_output = whole.pop()

    def share(tensor: Any) -> Any:
        return context.sequences.share(tensor, 2)

    def of_one_process(computed_in: Any) -> list[Any]:
        leaves = [tensor.to(computed_in, copy=True).requires_grad_() for tensor in whole]
        output = functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        output.backward(of_output.to(computed_in))
        return [share(tensor) for tensor in (output.detach(), *(leaf.grad for leaf in leaves))]

    parts = [share(tensor).requires_grad_() for tensor in whole]
    with context.split():
        output = functional.scaled_dot_product_attention(*parts, is_causal=causal)
    output.backward(share(of_output))
    found = [output.detach(), *(part.grad for part in parts)]
    ratios = [
        ((own - exact).norm() / (torchs - exact).norm()).item()
        for own, torchs, exact in zip(found, of_one_process(dtype), of_one_process(torch.float64), strict=True)
    ]
    dist.destroy_process_group()
    return ratios


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("strategy", ["allgather", "ulysses"])  # Gloo passes no tensors of a GPU on
def test_split_attention_is_as_exact_as_attention_of_torch(strategy: str, causal: bool, dtype: str) -> None:
    for ratios in run_processes(attention, 2, strategy, causal, dtype):
        assert max(ratios) < 3.0, f"output, and gradients of queries, keys and values: {ratios}"


def trained_on(sizes: dict[str, int], fused: bool) -> list[Any]:
    """Losses and norms of a transformer on a mesh."""
    import torch

    from accelerate_cpp import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate_cpp.utils import InitProcessGroupKwargs
    from meshes import batches, loss_of, network, share_of

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes else None
    run = Accelerator(
        parallelism_config=ParallelismConfig(**sizes),  # type: ignore[arg-type]
        fsdp_plugin=plugin,
        kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:gloo,cuda:gloo")],
    )
    assert run.device == torch.device("cuda", 0)
    model = network()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))
    assert all(weight.is_cuda for weight in model.parameters())
    found = []
    for inputs, targets in batches():
        buffers = [share_of(run, rows).to(run.device) for rows in (inputs, targets)]
        with run.maybe_context_parallel(buffers=buffers, buffer_seq_dims=[1, 1]):
            loss = loss_of(model, *buffers)
        run.backward(loss)
        norm = run.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
        found.append((run.reduce(loss.detach(), "mean").item(), float(norm)))
    run.end_training()
    return found


def trained_whole() -> list[Any]:
    """The same in one process, by plain torch."""
    import torch

    from meshes import batches, network, one_process

    model = network().cuda()
    data = [(inputs.cuda(), targets.cuda()) for inputs, targets in batches()]
    return one_process(model, data, torch.optim.AdamW(model.parameters(), lr=1e-2), max_norm=0.4)[0]


@pytest.mark.parametrize("fused", [False, True], ids=["as torch chooses", "fused"])
@pytest.mark.parametrize("axis", ["tp_size", "cp_size", "dp_shard_size"])
def test_a_transformer_on_a_mesh_trains_as_in_one_process(axis: str, fused: bool) -> None:
    (expected,) = run_processes(trained_whole, 1)
    for found in run_processes(trained_on, 2, {axis: 2}, fused, environment=ON_ONE_GPU):
        for own, other in zip(found, expected, strict=True):
            assert own == pytest.approx(other, rel=1e-4)


def scaled_on_split_layers() -> list[Any]:
    """The scales of the loss, and whether each step was skipped, in fp16 on split layers."""
    import torch

    from accelerate_cpp import Accelerator, ParallelismConfig
    from accelerate_cpp.utils import GradScalerKwargs, InitProcessGroupKwargs
    from meshes import batches, loss_of, network, share_of

    run = Accelerator(
        mixed_precision="fp16",
        parallelism_config=ParallelismConfig(tp_size=2),
        kwargs_handlers=[
            InitProcessGroupKwargs(backend="cpu:gloo,cuda:gloo"),
            GradScalerKwargs(init_scale=2.0**24, growth_interval=4),
        ],
    )
    model = network()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    found = []
    for inputs, targets in batches():
        loss = loss_of(model, *[share_of(run, rows).to(run.device) for rows in (inputs, targets)])
        run.backward(loss)
        run.clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()
        optimizer.zero_grad()
        found.append((run.scaler.get_scale(), run.optimizer_step_was_skipped, round(loss.item(), 2)))
    run.end_training()
    return found


def scaled_whole() -> list[Any]:
    """The same in one process, by plain torch."""
    import torch

    from meshes import batches, network

    model = network().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=4)
    found = []
    for inputs, targets in batches():
        before = scaler.get_scale()
        with torch.autocast("cuda", torch.float16):
            result = model(inputs.cuda())
        loss = (result.float() - targets.cuda()).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), scaler.get_scale() < before, round(loss.item(), 2)))
    return found


def test_overflows_on_split_layers_are_those_of_one_process() -> None:
    (expected,) = run_processes(scaled_whole, 1)
    assert any(skipped for _, skipped, _ in expected)
    assert not all(skipped for _, skipped, _ in expected)
    for found in run_processes(scaled_on_split_layers, 2, environment=ON_ONE_GPU):
        for (scale, skipped, loss), (other_scale, other_skipped, other_loss) in zip(found, expected, strict=True):
            assert (scale, skipped) == (other_scale, other_skipped)
            assert loss == pytest.approx(other_loss, abs=0.02)
