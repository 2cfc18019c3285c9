"""A shuffled order as a tensor, copies of tensors, and a checksum. All are tested in C++, beside their code."""

from __future__ import annotations

import zlib

import pytest
import torch

from accelerate_cpp._native import copy_tensors, crc32, permuted_indices
from accelerate_cpp.errors import InvalidArgument


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


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("count", [1, 1 << 20])
def test_the_bytes_of_tensors_are_copied(count, num_threads):
    sources = [torch.randn(count, dtype=torch.bfloat16), torch.arange(count), torch.empty(0), torch.tensor(7.0)]
    targets = [torch.zeros(tensor.nbytes, dtype=torch.uint8) for tensor in sources]
    copy_tensors(targets, sources, num_threads)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target.view(source.dtype).reshape(source.shape), source)


def test_copies_of_other_sizes_and_layouts_are_refused():
    with pytest.raises(InvalidArgument, match="as many targets as sources, found 1 and 2"):
        copy_tensors([torch.zeros(1)], [torch.zeros(1)] * 2, 1)
    for source in (torch.zeros(3), torch.zeros(2, 4)[:, ::2], torch.zeros(4, device="meta")):
        with pytest.raises(InvalidArgument, match="place 0"):
            copy_tensors([torch.zeros(4)], [source], 1)


def test_the_checksum_of_zip_goes_on_from_what_came_before():
    data = bytes(range(256)) * 5
    assert crc32(data) == zlib.crc32(data) == crc32(memoryview(data)[100:], crc32(data[:100]))
    with pytest.raises(InvalidArgument, match="contiguous memory"):
        crc32(memoryview(data)[::2])
