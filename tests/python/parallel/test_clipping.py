"""Clipping by the joint norm equals torch's."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate_cpp._native import create_backend
from accelerate_cpp.parallel.clipping import clip_grad_norm
from accelerate_cpp.parallel.data_parallel import DataParallel


def _parameters(*gradients: torch.Tensor | None) -> list[torch.nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(3) if gradient is None else torch.zeros_like(gradient))
        parameter.grad = None if gradient is None else gradient.clone()
        parameters.append(parameter)
    return parameters


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_gradients_and_norm_are_those_of_torch(max_norm: float, norm_type: float) -> None:
    gradients = [torch.randn(300, 400), None, torch.randn(7), torch.randn(5, 6).t()]
    ours, theirs = _parameters(*gradients), _parameters(*gradients)
    norm = clip_grad_norm(iter(ours), max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=norm_type)
    torch.testing.assert_close(norm, expected)
    for own, other in zip(ours, theirs, strict=True):
        assert (own.grad is None) == (other.grad is None)
        if own.grad is not None:
            torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_as_bad_as_with_torch(bad: float) -> None:
    gradient = torch.tensor([1.0, bad])
    [own], [other] = _parameters(gradient), _parameters(gradient)
    norm = clip_grad_norm([own], 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([other], 1.0), equal_nan=True)
    torch.testing.assert_close(own.grad, other.grad, equal_nan=True)


def test_a_parameter_that_is_given_twice_counts_once() -> None:
    [parameter] = _parameters(torch.tensor([3.0, 4.0]))
    assert clip_grad_norm([parameter, parameter], 2.5).item() == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([1.5, 2.0]))


def test_squares_that_were_measured_are_taken_as_they_are() -> None:
    first, second = _parameters(torch.tensor([100.0]), torch.tensor([4.0]))
    assert clip_grad_norm([first, second], 1e6, measured={id(first): (9.0, 1.0), 1: (100.0, 1.0)}).item() == 5.0


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize(("max_norm", "expected"), [(1e6, [3.0, 4.0]), (0.5, [0.3, 0.4])])
def test_a_factor_that_gradients_lack_is_applied_together_with_clipping(
    norm_type: float, max_norm: float, expected: list[float]
) -> None:
    first, second = _parameters(torch.tensor([6.0]), torch.tensor([4.0]))
    limit = max_norm if norm_type == 2.0 else max_norm * 1.4
    norm = clip_grad_norm([first, second], limit, norm_type, measured={id(first): (36.0, 0.5)})
    torch.testing.assert_close(norm, torch.tensor(5.0 if norm_type == 2.0 else 7.0))
    torch.testing.assert_close(torch.cat([first.grad, second.grad]), torch.tensor(expected))


def test_nothing_to_clip_has_norm_zero() -> None:
    assert clip_grad_norm(_parameters(None), 1.0).item() == 0.0
    assert clip_grad_norm([], 1.0).item() == 0.0


def _on_device(figure: float) -> torch.Tensor:
    return torch.tensor(figure, dtype=torch.float64)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_a_device_knows_is_used_with_what_torch_measures_beside_it(max_norm: float, dtype: torch.dtype) -> None:
    gradients = [torch.randn(30, 40).to(dtype), None, torch.randn(7).to(dtype), torch.randn(5, 6).to(dtype).t()]
    ours, theirs = _parameters(*gradients), _parameters(*gradients)
    known, other = ours[0], ours[2]
    known.grad.mul_(4.0)  # type: ignore[union-attr]
    squares = known.grad.double().square().sum()  # type: ignore[union-attr]
    measured = {
        id(known): (squares, torch.tensor(0.25)),
        id(other): (other.grad.double().square().sum(), 1.0),  # type: ignore[union-attr]
    }
    norm = clip_grad_norm(ours, max_norm, measured=measured)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    torch.testing.assert_close(norm, expected)
    for own, theirs_own in zip(ours, theirs, strict=True):
        if own.grad is not None:
            torch.testing.assert_close(own.grad, theirs_own.grad)


def test_a_coefficient_on_a_device_is_not_rounded_to_the_dtype_of_the_gradients() -> None:
    gradient = torch.full((4096,), 3.0, dtype=torch.bfloat16)
    [parameter] = _parameters(gradient)
    clip_grad_norm([parameter], 64.0 * 1.003, measured={id(parameter): (_on_device(9.0 * 4096), 1.0)})
    assert parameter.grad[0].item() == torch.tensor(1.003).bfloat16().item()  # type: ignore[index]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_on_a_device_is_as_bad_as_with_torch(bad: float) -> None:
    gradient = torch.tensor([1.0, bad])
    [own], [other] = _parameters(gradient), _parameters(gradient)
    norm = clip_grad_norm([own], 1.0, measured={id(own): (_on_device(bad), 1.0)})
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_([other], 1.0), equal_nan=True)
    torch.testing.assert_close(own.grad, other.grad, equal_nan=True)


def test_factors_on_a_device_are_applied_before_torch_clips_by_another_norm() -> None:
    [parameter] = _parameters(torch.tensor([6.0, 8.0]))
    norm = clip_grad_norm([parameter], 7.0, 1.0, measured={id(parameter): (_on_device(100.0), torch.tensor(0.5))})
    assert norm.item() == 7.0
    torch.testing.assert_close(parameter.grad, torch.tensor([3.0, 4.0]))


class _Recorded(TorchDispatchMode):
    """Notes the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(platform.system() != "Linux", reason="backend shm exists on Linux only")
@pytest.mark.usefixtures("group_of_one")
def test_gradients_that_the_reduction_on_a_device_has_measured_are_not_measured_again() -> None:
    minute = timedelta(minutes=1)
    communicator = create_backend(dist.HashStore(), 0, 1, minute).communicator
    make_group = partial(dist.new_group, backend="gloo")
    model = DataParallel(torch.nn.Linear(2, 1, bias=False), communicator, minute, make_device_group=make_group)
    for _ in range(2):  # the reduction measures once somebody has asked
        model.zero_grad()
        model(torch.tensor([[6.0, 8.0]])).sum().backward()
        with _Recorded() as recorded:
            norm = clip_grad_norm(model.parameters(), 5.0)
    assert norm.item() == 10.0
    torch.testing.assert_close(model.module.weight.grad, torch.tensor([[3.0, 4.0]]))
    assert "aten::_amp_foreach_non_finite_check_and_unscale_" in recorded.names, "the host has read the norm"
    assert not {"aten::_local_scalar_dense", "aten::_foreach_norm.Scalar"} & set(recorded.names)
