"""The loss scale and the gradient epilogue, as Python sees them."""

from __future__ import annotations

import math

import pytest
import torch

from accelerate_cpp._native import LossScale, measure_gradients, scale_gradients
from accelerate_cpp.errors import InvalidArgument


def test_a_scale_follows_overflows_and_their_absence() -> None:
    scale = LossScale(1024.0, growth_interval=2)
    scale.update(overflow=True)
    assert (scale.value, scale.growth_tracker) == (512.0, 0)
    scale.update(overflow=False)
    scale.update(overflow=False)
    assert (scale.value, scale.growth_tracker) == (1024.0, 0)
    scale.set(3.0)
    assert scale.value == 3.0


def test_a_scale_continues_from_a_saved_one() -> None:
    scale = LossScale()
    scale.restore(8.0, 5, 4.0, 0.25, 6)
    assert (scale.value, scale.growth_tracker) == (8.0, 5)
    assert (scale.growth_factor, scale.backoff_factor, scale.growth_interval) == (4.0, 0.25, 6)


def test_what_is_out_of_range_is_refused_with_what_was_expected() -> None:
    with pytest.raises(InvalidArgument, match="growth_factor of the loss scale has to be above 1; found 1"):
        LossScale(growth_factor=1.0)


def test_gradients_are_scaled_and_measured() -> None:
    gradients = [torch.tensor([3.0, 4.0]), torch.tensor([1.0, math.inf], dtype=torch.bfloat16)]
    (squares, bad), (_, bad_too) = scale_gradients(gradients, 2.0)
    assert (squares, bad, bad_too) == (100.0, 0, 1)
    assert gradients[0].tolist() == [6.0, 8.0]
    assert measure_gradients(gradients[:1]) == [(100.0, 0)]


def test_integers_have_no_gradient() -> None:
    with pytest.raises(InvalidArgument, match="floating-point"):
        measure_gradients([torch.ones(2, dtype=torch.int64)])
