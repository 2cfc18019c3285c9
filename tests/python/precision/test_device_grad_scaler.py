"""The loss scaler of accelerators trains as torch's, and takes no pass over what a reduction has measured.

Run on the CPU, where a process group of one sums the gradients in place of an accelerator's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate_cpp._native import GradientReducer, create_backend, known_device_statistics
from accelerate_cpp.precision.device_grad_scaler import DeviceGradScaler
from accelerate_cpp.precision.grad_scaler import overflowed, unscale_all

MINUTE = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(*parameters: torch.nn.Parameter) -> GradientReducer:
    """What averages the gradients of ``parameters``, and measures them from now on."""
    reducer = GradientReducer(
        create_backend(dist.HashStore(), 0, 1, MINUTE).communicator,
        [(f"p{number}", parameter, False) for number, parameter in enumerate(parameters)],
        left_out=[],
        first_bucket_cap_bytes=1 << 20,
        bucket_cap_bytes=1 << 20,
        timeout=MINUTE,
        device_group=dist.group.WORLD,
    )
    known_device_statistics(list(parameters))
    return reducer


def backward(scaler: torch.amp.GradScaler, parameter: torch.nn.Parameter, gradient: list[float]) -> None:
    parameter.grad = None
    scaler.scale((parameter * torch.tensor(gradient)).sum()).backward()


def test_without_a_reduction_it_is_torchs() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DeviceGradScaler("cpu", init_scale=8.0)
    backward(scaler, parameter, [1.0, 2.0, 3.0])
    assert scaler.unscale_but(optimizer, frozenset([id(parameter)])) == {}
    assert scaler.is_unscaled(optimizer)
    torch.testing.assert_close(parameter.grad, torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("fused", [False, True])
def test_it_trains_as_torchs_does(fused: bool) -> None:
    def train(scaler: torch.amp.GradScaler, keep: list[Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(8))
        keep.append(reduced(parameter))
        optimizer = torch.optim.AdamW([parameter], lr=0.01, fused=fused)
        for step in range(12):
            known_device_statistics([parameter])
            backward(scaler, parameter, [math.inf if step % 5 == 3 else step + 1.0] * 8)
            scaler.step(optimizer)
            scaler.update()
        return parameter.detach(), scaler.state_dict()

    options: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
    kept: list[Any] = []
    ours, our_state = train(DeviceGradScaler("cpu", **options), kept)
    theirs, their_state = train(torch.amp.GradScaler("cpu", **options), kept)
    assert our_state == their_state
    torch.testing.assert_close(ours, theirs)


def test_what_is_left_to_the_caller_is_neither_touched_nor_looked_at() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    _reducer = reduced(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DeviceGradScaler("cpu", init_scale=8.0)
    backward(scaler, parameter, [3.0, 4.0])
    measured = unscale_all(scaler, [optimizer], left=[parameter])
    squares, factor = measured[id(parameter)]
    assert (float(squares), float(factor)) == (64 * 25.0, 0.125)
    assert known_device_statistics([parameter])[0] is not None  # Python has not taken hold of the gradient
    assert parameter.grad.tolist() == [24.0, 32.0]  # type: ignore[union-attr]
    assert unscale_all(scaler, [optimizer], left=[parameter]) == {}


def test_a_gradient_that_the_caller_does_not_take_is_un_scaled() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    _reducer = reduced(parameter)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DeviceGradScaler("cpu", init_scale=8.0)
    backward(scaler, parameter, [3.0, 4.0])
    assert unscale_all(scaler, [optimizer]) == {}
    assert parameter.grad.tolist() == [3.0, 4.0]  # type: ignore[union-attr]


def test_an_overflow_among_measured_and_other_gradients_is_found() -> None:
    for bad in range(3):
        measured, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        _reducer = reduced(measured)
        optimizer = torch.optim.SGD([measured, other], lr=1.0)
        scaler = DeviceGradScaler("cpu", init_scale=8.0)
        backward(scaler, measured, [1.0, math.nan if bad == 1 else 1.0])
        other.grad = torch.tensor([1.0, math.inf if bad == 2 else 1.0])
        scaler.unscale_but(optimizer, frozenset([id(measured)]))
        assert bool(overflowed(scaler, optimizer)) == (bad > 0)


def test_gradients_in_fp16_are_refused_as_torch_refuses_them() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    _reducer = reduced(parameter)
    scaler = DeviceGradScaler("cpu", init_scale=8.0)
    backward(scaler, parameter, [1.0, 2.0])
    with pytest.raises(ValueError, match="FP16"):
        scaler.unscale_but(torch.optim.SGD([parameter], lr=1.0), frozenset([id(parameter)]))


def test_one_that_is_not_enabled_does_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = DeviceGradScaler("cpu", enabled=False)
    assert scaler.is_unscaled(optimizer)
    assert scaler.unscale_but(optimizer, frozenset()) == {}
    assert parameter.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [None, "in shards", "plain"])
def test_gradients_in_shards_and_plain_ones_are_unscaled_in_one_step(bad: str | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    split = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    plain = torch.nn.Parameter(torch.ones(2))
    own = torch.optim.SGD([split, plain], lr=1.0, foreach=False)
    expected = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2))]
    theirs = torch.optim.SGD(expected, lr=1.0)
    for scaler, optimizer, weights in (
        (DeviceGradScaler("cpu", init_scale=8.0), own, [split, plain]),
        (torch.amp.GradScaler("cpu", init_scale=8.0), theirs, expected),
    ):
        factors = [math.inf if bad == name else 3.0 for name in ("in shards", "plain")]
        for weight, factor in zip(weights, factors, strict=True):
            scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if bad is None else 4.0)
    assert torch.equal(split.full_tensor(), expected[0])  # type: ignore[attr-defined]
    assert torch.equal(plain, expected[1])
