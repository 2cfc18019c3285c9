"""What process 0 reads and announces, alone; tests/distributed/test_dispatch.py has the exchange between processes."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch

from accelerate_cpp.data import batch_dispatch as dispatch
from accelerate_cpp.data.batch_dispatch import Dispatch

CPU = torch.device("cpu")


def test_one_process_gets_whole_batches_until_the_end():
    batch = {"x": torch.arange(3)}
    alone = Dispatch(iter([(batch, [3], True)]), CPU, scatters=True)
    step = alone.next_step()
    assert (step.sizes, step.is_last, step.scattered) == ([3], True, False)
    assert alone.part(step, [0, 3], lambda whole: whole) is batch
    assert alone.next_step() is None


def test_an_error_while_reading_is_raised():
    def broken():
        raise OSError("the disk is gone")
        yield

    with pytest.raises(OSError, match="the disk is gone"):
        Dispatch(broken(), CPU, scatters=True).next_step()


@pytest.mark.parametrize(
    ("data", "scatters"),
    [
        ({"x": torch.zeros(3, 2), "y": [torch.zeros(3)]}, True),
        ({"x": torch.zeros(3, 2), "y": torch.zeros(4)}, False),
        ({"x": torch.zeros(3), "y": torch.tensor(1.0)}, False),
        ({"y": torch.tensor(1.0), "x": torch.zeros(3)}, False),
        ("three names", False),
        ((torch.zeros(3), "three names"), False),
        (torch.zeros(3).to_sparse(), False),
    ],
)
def test_rows_are_scattered_only_where_all_tensors_have_them(data, scatters):
    assert dispatch._has_rows(data, dispatch._rows(data)) is scatters


def test_structures_differ_in_containers_keys_shapes_and_dtypes():
    def signature(data):
        return dispatch._signature(dispatch._structure(data, scattered=True))

    batch = {"x": torch.zeros(3, 2)}
    assert signature(batch) == signature({"x": torch.zeros(5, 2)})
    others = [{"y": torch.zeros(3, 2)}, UserDict(batch), {"x": torch.zeros(3, 1)}, {"x": torch.zeros(3, 2).half()}, [1]]
    assert all(signature(other) != signature(batch) for other in others)
    assert signature(["name"]) != signature(["name"])


def test_a_short_part_is_padded():
    assert dispatch._padded(torch.tensor([1, 2]), 3)[:2].tolist() == [1, 2]
    assert dispatch._padded(torch.tensor([1, 2]), 3).shape == (3,)
