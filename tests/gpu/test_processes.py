"""Processes that train together on one GPU, and one process in a group of its own.

NCCL wants a GPU for each process, so Gloo sums what two of them compute: the models, the buckets of gradients, the
kernels and the streams are those of the GPU.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest

from processes import run_processes, start_processes

# Torch is imported inside the functions: they run in processes of their own.

ON_ONE_GPU = {"ACCELERATE_TORCH_DEVICE": "cuda:0"}
STEPS = 6
SCALE = 2.0**24


def network() -> Any:
    """Several buckets of gradients, one layer that no step uses, and one that is used twice."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 1500)
            self.twice = nn.Linear(1500, 1500)
            self.last = nn.Linear(1500, 8)
            self.unused = nn.Linear(3, 3)

        def forward(self, data: Any) -> Any:
            hidden = torch.tanh(self.first(data))
            return self.last(torch.tanh(self.twice(torch.tanh(self.twice(hidden)))))

    torch.manual_seed(0)
    return Network()


def micro_batch(step: int, rank: int) -> Any:
    import torch

    return torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()


def momentum(dtype_name: str, fused: bool) -> float:
    """Torch's fused SGD starts with arbitrary momenta where the first step overflows, as it does here in fp16."""
    return 0.0 if fused and dtype_name == "float16" else 0.9


def by_torch(dtype_name: str, accumulated: int, fused: bool) -> dict[str, Any]:
    """Weights after the steps of torch's wrapper over Gloo, the norms, and the scales of the loss."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:gloo")
    model = torch.nn.parallel.DistributedDataParallel(network().cuda(), device_ids=[0], find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum(dtype_name, fused))
    scaler = torch.amp.GradScaler("cuda", init_scale=SCALE, growth_interval=2, enabled=dtype_name == "float16")
    norms, scales = [], []
    for step in range(STEPS * accumulated):
        model.require_backward_grad_sync = (step + 1) % accumulated == 0
        with torch.autocast("cuda", getattr(torch, dtype_name), enabled=dtype_name != "float32"):
            result = model(micro_batch(step, dist.get_rank()))
        scaler.scale(result.float().pow(2).mean() / accumulated).backward()
        if model.require_backward_grad_sync:
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
    weights = {name: weight.tolist() for name, weight in model.module.named_parameters() if weight.dim() == 1}
    dist.destroy_process_group()
    return {"weights": weights, "norms": norms, "scales": scales}


def by_accelerator(dtype_name: str, accumulated: int, fused: bool = False) -> dict[str, Any]:
    """The same with our wrapper, whose process group ``cpu:shm,cuda:gloo`` chooses."""
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.parallel.data_parallel import DataParallel
    from accelerate_cpp.utils import GradScalerKwargs, InitProcessGroupKwargs

    accelerator = Accelerator(
        mixed_precision={"float32": "no", "bfloat16": "bf16", "float16": "fp16"}[dtype_name],
        gradient_accumulation_steps=accumulated,
        kwargs_handlers=[
            InitProcessGroupKwargs(backend="cpu:shm,cuda:gloo"),
            GradScalerKwargs(init_scale=SCALE, growth_interval=2),
        ],
    )
    model = network()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum(dtype_name, fused), fused=fused)
    )
    assert isinstance(model, DataParallel)
    norms, scales = [], []
    for step in range(STEPS * accumulated):
        with accelerator.accumulate(model):
            accelerator.backward(model(micro_batch(step, accelerator.process_index)).float().pow(2).mean())
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            if accelerator.sync_gradients:
                scales.append(1.0 if accelerator.scaler is None else accelerator.scaler.get_scale())
            optimizer.zero_grad()
    module = accelerator.unwrap_model(model)
    assert module.unused.weight.grad is None
    weights = {name: weight.tolist() for name, weight in module.named_parameters() if weight.dim() == 1}
    accelerator.end_training()
    return {"weights": weights, "norms": norms, "scales": scales}


def same(own: dict[str, Any], expected: dict[str, Any], rounding: float) -> None:
    assert own["scales"] == expected["scales"]
    assert own["norms"] == pytest.approx(expected["norms"], rel=rounding, nan_ok=True)
    for name, weight in own["weights"].items():
        assert weight == pytest.approx(expected["weights"][name], rel=rounding, abs=rounding / 10), name


@pytest.mark.parametrize("kernels", ["0", "1"], ids=["torch's operations", "kernels"])
@pytest.mark.parametrize(("dtype", "accumulated", "fused"), [("float32", 1, False), ("float32", 3, True)])
def test_two_processes_train_as_with_torchs_wrapper(dtype: str, accumulated: int, fused: bool, kernels: str) -> None:
    variables = {**ON_ONE_GPU, "ACCELERATE_CPP_CUDA_KERNELS": kernels}
    own = run_processes(by_accelerator, 2, dtype, accumulated, fused, environment=variables)
    expected = run_processes(by_torch, 2, dtype, accumulated, fused)
    for ours, theirs in zip(own, expected, strict=True):
        same(ours, theirs, 1e-4)
    assert own[0]["weights"] == own[1]["weights"]


@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "fused SGD"])
@pytest.mark.parametrize("kernels", ["0", "1"], ids=["torch's operations", "kernels"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_mixed_precision_and_overflows_are_those_of_torch(dtype: str, kernels: str, fused: bool) -> None:
    variables = {**ON_ONE_GPU, "ACCELERATE_CPP_CUDA_KERNELS": kernels}
    own = run_processes(by_accelerator, 2, dtype, 1, fused, environment=variables)
    expected = run_processes(by_torch, 2, dtype, 1, fused)
    for ours, theirs in zip(own, expected, strict=True):
        same(ours, theirs, 2e-3)
    if dtype == "float16":
        scales = own[0]["scales"]
        assert scales[0] < SCALE, "the first step does not overflow"
        assert scales[-1] > min(scales) or scales[-2] == scales[-1], "no step fits"


def kernels_that_serve() -> tuple[list[str], list[list[float]], list[list[float]]]:
    """Warnings of our wrapper with kernels, and what was measured while gradients of two ranks were averaged, by them
    and by torch afterwards.
    """
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp._native import known_device_statistics
    from accelerate_cpp.utils import InitProcessGroupKwargs

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:shm,cuda:gloo")])
        model = accelerator.prepare(network())
        parameters = [weight for name, weight in model.module.named_parameters() if "unused" not in name]
        for step in range(2):
            known_device_statistics(parameters)  # gradients are measured for whoever has asked before
            model.zero_grad()
            accelerator.backward(model(micro_batch(step, accelerator.process_index)).pow(2).sum())
        rows = known_device_statistics(parameters)
    assert None not in rows
    measured = [row.tolist() for row in rows]
    by_torch = [[weight.grad.double().pow(2).sum().item(), 0.0] for weight in parameters]
    accelerator.end_training()
    texts = [str(warning.message) for warning in caught if "kernels" in str(warning.message)]
    torch.cuda.synchronize()
    return texts, measured, by_torch


def test_kernels_are_compiled_here_and_measure_what_torch_computes_in_double_precision() -> None:
    variables = {**ON_ONE_GPU, "ACCELERATE_CPP_CUDA_KERNELS": "1"}
    for texts, measured, expected in run_processes(kernels_that_serve, 2, environment=variables):
        assert texts == []
        for row, other in zip(measured, expected, strict=True):
            assert row == pytest.approx(other, rel=1e-12)


def reduced_alone() -> list[Any]:
    """Steps in a group of one process: our wrapper over NCCL, and the model alone. Their largest difference, and
    whether NCCL was asked directly.
    """
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.parallel.data_parallel import DataParallel, core_backend, device_group_maker
    from accelerate_cpp.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:shm,cuda:nccl")])
    backend = core_backend()
    assert backend is not None
    plain = network().cuda()
    model = DataParallel(
        network().cuda(),
        backend.communicator,
        backend.timeout,
        make_device_group=device_group_maker(accelerator.device, backend.timeout),
        nccl=os.environ["ASKS_NCCL"] == "1",
    )
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (model, plain)]
    for step in range(STEPS):
        for module, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            module(micro_batch(step, 0)).pow(2).mean().backward()
            optimizer.step()
    differences = [
        (own - expected).abs().max().item()
        for own, expected in zip(model.module.parameters(), plain.parameters(), strict=True)
    ]
    serves = model._nccl_comm is not None
    accelerator.end_training()
    return [max(differences), serves]


@pytest.mark.parametrize("directly", ["0", "1"], ids=["torch's group", "NCCL itself"])
def test_buckets_that_nccl_sums_over_one_process_are_the_gradients_of_the_model_alone(directly: str) -> None:
    ((difference, serves),) = run_processes(reduced_alone, 1, environment={"ASKS_NCCL": directly})
    assert difference == 0.0
    assert serves is (directly == "1")


def failing_pass(backend: str) -> list[str]:
    """Gradients of passes of which the second fails on the last rank, or what is raised."""
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.parallel.data_parallel import DataParallel, core_backend, device_group_maker
    from accelerate_cpp.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    core = core_backend()
    assert core is not None
    model = DataParallel(
        torch.nn.Linear(3, 1, bias=False).cuda(),
        core.communicator,
        core.timeout,
        make_device_group=device_group_maker(accelerator.device, core.timeout),
        nccl=os.environ.get("ASKS_NCCL") == "1",
    )
    last = accelerator.process_index + 1 == accelerator.num_processes
    found = []
    for fails in (False, True, False):
        model.zero_grad()
        loss = model(torch.full((1, 3), float(accelerator.process_index + 1), device="cuda")).sum()
        model.expect_backward()
        try:
            if fails and last:
                raise RuntimeError("out of memory")
            loss.backward()
            model.backward_ended()
            found.append(str(model.module.weight.grad.tolist()))
        except RuntimeError as error:
            model.backward_failed(str(error))
            assert model.module.weight.grad is None
            found.append(f"{type(error).__name__}: {error}")
    accelerator.end_training()
    return found


def test_a_pass_that_fails_on_one_process_raises_on_both_and_the_next_one_works() -> None:
    first, second = run_processes(failing_pass, 2, "cpu:shm,cuda:gloo", environment=ON_ONE_GPU)
    assert first[0] == first[2] == second[0] == second[2] == "[[1.5, 1.5, 1.5]]"
    assert first[1].startswith("PeerLost: ")
    assert "out of memory" in first[1]
    assert second[1] == "RuntimeError: out of memory"


@pytest.mark.parametrize("directly", ["0", "1"], ids=["torch's group", "NCCL itself"])
def test_nccl_is_ended_after_a_pass_that_failed_and_the_next_one_works(directly: str) -> None:
    (found,) = run_processes(failing_pass, 1, "cpu:shm,cuda:nccl", environment={"ASKS_NCCL": directly})
    assert found == ["[[1.0, 1.0, 1.0]]", "RuntimeError: out of memory", "[[1.0, 1.0, 1.0]]"]


def nccl_of_two_on_one_gpu() -> str:
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="cpu:shm,cuda:gloo")])
    try:
        accelerator.prepare(network())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.cuda.synchronize()
    return "NCCL took both"


def test_nccl_says_on_both_ranks_that_they_share_a_gpu() -> None:
    variables = {**ON_ONE_GPU, "ACCELERATE_CPP_NCCL": "1"}
    for outcome in start_processes(nccl_of_two_on_one_gpu, 2, environment=variables):
        assert outcome.exit_code == 0, outcome.stderr
        assert "NCCL" in outcome.value
        assert "Duplicate GPU" in outcome.value or "invalid usage" in outcome.value, outcome.value


def layers() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))


def sharded(backend: str, own_sharding: bool) -> list[Any]:
    """Losses and norms of a model in shards, and where these are.

    Args:
        own_sharding: the program shards the model itself, by torch's ``fully_shard``.
    """
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from accelerate_cpp import Accelerator, FullyShardedDataParallelPlugin
    from accelerate_cpp.utils import InitProcessGroupKwargs

    plugin = None if own_sharding else FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
    accelerator = Accelerator(fsdp_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    model = layers()
    if own_sharding:
        model = fully_shard(model.cuda())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert all(isinstance(weight, DTensor) and weight.is_cuda for weight in model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(micro_batch(step, accelerator.process_index)).pow(2).mean()
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    accelerator.end_training()
    return [losses, norms]


def trained_whole(processes: int) -> list[Any]:
    """The same in one process without shards, on the batches of all."""
    import torch

    model = layers().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.cat([micro_batch(step, rank) for rank in range(processes)])).pow(2).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        losses.append(loss.item())
    return [losses, norms]


@pytest.mark.parametrize(
    ("processes", "backend", "own_sharding"), [(1, "cpu:gloo,cuda:nccl", True), (2, "cpu:gloo,cuda:gloo", False)]
)
def test_a_model_in_shards_trains_as_the_whole_model(processes: int, backend: str, own_sharding: bool) -> None:
    found = run_processes(sharded, processes, backend, own_sharding, environment=ON_ONE_GPU)
    ((losses, norms),) = run_processes(trained_whole, 1, processes)
    for own_losses, own_norms in found:
        assert own_losses == pytest.approx(losses, rel=1e-4)
        assert own_norms == pytest.approx(norms, rel=1e-4)


def gathered() -> list[Any]:
    """What the operations of an Accelerator bring together of tensors on the GPU."""
    import torch

    from accelerate_cpp import Accelerator
    from accelerate_cpp.utils import InitProcessGroupKwargs, broadcast, broadcast_object_list

    backend = os.environ["BACKEND"]
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    rank = accelerator.process_index
    own = torch.arange(3.0, device=accelerator.device) + 10 * rank
    found = [
        accelerator.gather(own).tolist(),
        accelerator.reduce(own, "mean").tolist(),
        accelerator.pad_across_processes(own[: 3 - rank]).tolist(),
        broadcast(own.clone()).tolist(),
        accelerator.gather_for_metrics([rank], use_gather_object=True),
        broadcast_object_list([rank])[0],
        str(accelerator.gather({"a": own})["a"].device),
    ]
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return found


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", "cpu:shm,cuda:gloo"])
def test_operations_take_tensors_of_the_gpu(backend: str) -> None:
    values = run_processes(gathered, 2, environment={**ON_ONE_GPU, "BACKEND": backend})
    for rank, found in enumerate(values):
        assert found[:2] == [[0.0, 1.0, 2.0, 10.0, 11.0, 12.0], [5.0, 6.0, 7.0]]
        assert found[2] == [[0.0, 1.0, 2.0], [10.0, 11.0, 0.0]][rank]
        assert found[3:] == [[0.0, 1.0, 2.0], [0, 1], 0, "cuda:0"]
