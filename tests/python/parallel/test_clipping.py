"""Clipping by the joint norm equals torch's."""

from __future__ import annotations

import math

import pytest
import torch

from accelerate_cpp.parallel.clipping import clip_grad_norm


def _parameters(*gradients: torch.Tensor | None) -> list[torch.nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = torch.nn.Parameter(torch.zeros(3 if gradient is None else gradient.shape))
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
