"""Gradients on GPUs, with torch's operations and with our kernels: what only such a machine can tell."""

from __future__ import annotations

from typing import Any

import pytest

from processes import run_processes

# Torch is imported inside the functions: they run in processes of their own.


@pytest.fixture(scope="module")
def num_processes() -> int:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return min(2, torch.cuda.device_count())


def wrapped_on_gpu(module: Any, dtype_name: str, kernels: bool, nccl: bool = False) -> Any:
    """``module`` in our wrapper, on this process's GPU."""
    import torch
    import torch.distributed as dist

    import accelerate_cpp.comm.backend
    from accelerate_cpp.parallel.data_parallel import DataParallel, core_backend, device_group_maker

    accelerate_cpp.comm.backend.register()
    dist.init_process_group("cpu:shm,cuda:nccl")
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    backend = core_backend()
    assert backend is not None
    return DataParallel(
        module.to(device, getattr(torch, dtype_name)),
        backend.communicator,
        backend.timeout,
        make_device_group=device_group_maker(device, backend.timeout),
        device_kernels=kernels,
        nccl=nccl,
    )


def clipped_steps(dtype_name: str, kernels: bool) -> dict[str, Any]:
    """Three steps of a model on a GPU; what the reduction measured in the last one, and what the host finds."""
    import torch
    import torch.distributed as dist

    from accelerate_cpp._native import known_device_statistics, measure_gradients
    from accelerate_cpp.parallel.clipping import clip_grad_norm
    from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
    from accelerate_cpp.precision.grad_scaler import unscale_all

    layers = [torch.nn.Linear(37, 3001), torch.nn.Tanh(), torch.nn.Linear(3001, 5)]
    model = wrapped_on_gpu(torch.nn.Sequential(*layers), dtype_name, kernels)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    scaler = DeviceGradScaler("cuda", init_scale=64.0, enabled=dtype_name == "float32")
    data = torch.randn(3, 8, 37).to(parameters[0])
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(data[step]).float().pow(2).mean()).backward()
        rows = known_device_statistics(parameters)
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        norm = clip_grad_norm(parameters, 1e-3, measured=unscale_all(scaler, [optimizer], left=parameters))
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.set_sync_debug_mode("default")
    assert None not in rows
    clipped = measure_gradients([parameter.grad.cpu() for parameter in parameters])
    found = {
        "norm": norm.item(),
        "rows": [row.tolist() for row in rows],
        "scale": scaler.get_scale(),
        "limit": sum(squares for squares, _ in clipped) ** 0.5,
        "shares": [squares for squares, _ in clipped],
    }
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("kernels", [False, True], ids=["aten", "kernels"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_statistics_and_clipping_need_no_look_from_the_host(num_processes: int, dtype: str, kernels: bool) -> None:
    for found in run_processes(clipped_steps, num_processes, dtype, kernels):
        squares = [row[0] for row in found["rows"]]
        assert [row[1] for row in found["rows"]] == [0.0] * 4
        rounding = 1e-5 if dtype == "float32" else 1e-2
        assert sum(squares) ** 0.5 / found["scale"] == pytest.approx(found["norm"], rel=rounding)
        assert found["limit"] == pytest.approx(1e-3, rel=rounding)
        # Clipping multiplies all by one number, so that the parameters' shares of the sum stay.
        for own, clipped in zip(squares, found["shares"], strict=True):
            assert own / sum(squares) == pytest.approx(clipped / sum(found["shares"]), rel=3 * rounding)


def sums_on_gpu(dtype_name: str) -> list[tuple[list[float], list[float]]]:
    """By kernels, of gradients with numbers that are not finite: what was measured, and what the host finds."""
    import torch
    import torch.distributed as dist

    from accelerate_cpp._native import known_device_statistics, measure_gradients

    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = torch.nn.ParameterList([torch.zeros(count) for count in (1, 7, 16384, 50001)])

        def forward(self) -> Any:
            return sum((parameter * weight).sum() for parameter, weight in zip(self.all, weights, strict=True))

    model = wrapped_on_gpu(Weighted(), dtype_name, True)
    parameters = list(model.parameters())
    weights = [torch.linspace(-2.0, 3.0, parameter.numel()).to(parameter) for parameter in parameters]
    weights[1][3], weights[3][40000] = float("inf"), float("nan")
    found = []
    for _ in range(2):
        known_device_statistics(parameters)
        model.zero_grad()
        model().backward()
    rows = known_device_statistics(parameters)
    for parameter, row in zip(parameters, rows, strict=True):
        assert row is not None, "the kernels were not loaded: see the warning"
        found.append((row.tolist(), list(measure_gradients([parameter.grad.cpu()])[0])))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_the_kernels_find_what_the_host_finds(num_processes: int, dtype: str) -> None:
    for found in run_processes(sums_on_gpu, num_processes, dtype):
        for (squares, count), (expected, expected_count) in found:
            assert count == expected_count
            assert squares == pytest.approx(expected, rel=1e-12, nan_ok=True)


def trained_over(nccl: bool) -> list[list[float]]:
    """The parameters after three steps, with the sums of torch's process group or without it."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(5)
    model = wrapped_on_gpu(
        torch.nn.Sequential(torch.nn.Linear(37, 3001), torch.nn.Linear(3001, 5)), "float32", False, nccl
    )
    assert (model._nccl_comm is not None) is nccl, "NCCL was not opened: see the warning"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        data = torch.linspace(-1.0, 1.0, 8 * 37, device=model.device).reshape(8, 37) * (dist.get_rank() + step + 1)
        model(data).pow(2).mean().backward()
        optimizer.step()
    weights = [parameter.flatten()[:100].tolist() for parameter in model.parameters()]
    dist.destroy_process_group()
    return weights


def test_nccl_without_torchs_group_trains_alike(num_processes: int) -> None:
    for own, of_torch in zip(
        run_processes(trained_over, num_processes, True), run_processes(trained_over, num_processes, False), strict=True
    ):
        for weights, expected in zip(own, of_torch, strict=True):
            assert weights == pytest.approx(expected, rel=1e-5, abs=1e-7)
