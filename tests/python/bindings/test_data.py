"""The shuffled order of the core, as a tensor. Its quality is tested in C++."""

from __future__ import annotations

import torch

from accelerate_cpp._native import permuted_indices


def test_parts_of_an_order_fit_together():
    whole = permuted_indices(1000, 3, 0, 0, 1000)
    assert whole.dtype is torch.int64
    assert sorted(whole.tolist()) == list(range(1000))
    assert torch.equal(torch.cat([permuted_indices(1000, 3, 0, 0, 7), permuted_indices(1000, 3, 0, 7, 1000)]), whole)
    assert not torch.equal(permuted_indices(1000, 3, 1, 0, 1000), whole)


def test_what_lies_behind_the_end_is_left_out():
    assert permuted_indices(5, 2**64 - 1, 0, 3, 9).shape == (2,)
    assert permuted_indices(5, 0, 0, 7, 9).shape == (0,)
    assert permuted_indices(5, 0, 0, 4, 2).shape == (0,)
    assert permuted_indices(0, 0, 0, 0, 1).shape == (0,)
