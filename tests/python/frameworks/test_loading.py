from __future__ import annotations

import numpy as np
import pytest
import torch

from accelerate_cpp.errors import InvalidArgument
from accelerate_cpp.frameworks.loading import Rows, loader_of, loader_of_arrays, map_leaves


def test_rows_that_follow_each_other_are_views_and_others_are_copied_to_aligned_memory() -> None:
    table, numbers = np.arange(12.0).reshape(6, 2), torch.arange(6)
    rows = Rows({"table": table, "numbers": numbers})
    following = rows[[2, 3]]
    assert np.shares_memory(following["table"], table)
    assert following["numbers"].data_ptr() == numbers[2:].data_ptr()
    scattered = rows[[4, 0, 2]]
    assert scattered["table"].tolist() == table[[4, 0, 2]].tolist()
    assert scattered["numbers"].tolist() == [4, 0, 2]
    assert scattered["table"].ctypes.data % 64 == 0


@pytest.mark.parametrize("arrays", [{}, [np.ones(3), np.ones(4)], np.float32(1.0)])
def test_arrays_without_rows_or_with_different_numbers_of_rows_are_refused(arrays: object) -> None:
    with pytest.raises(InvalidArgument, match="the same number of rows"):
        Rows(arrays)


def test_a_batch_has_at_least_one_row() -> None:
    with pytest.raises(InvalidArgument, match="batch_size=0"):
        loader_of_arrays(np.ones(3), batch_size=0)


def test_leaves_are_mapped_and_containers_kept() -> None:
    assert map_leaves(lambda leaf: leaf + 1, {"a": [1, (2, 3)]}) == {"a": [2, (3, 4)]}


def test_a_loader_of_torch_is_taken_as_it_is_and_arrays_need_a_batch_size() -> None:
    loader = loader_of(np.arange(4), batch_size=2)
    assert loader_of(loader) is loader
    with pytest.raises(InvalidArgument, match="expected batch_size for arrays"):
        loader_of(np.arange(4))
