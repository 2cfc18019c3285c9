"""What of the core fetches weights ahead. That it does is tested in GoogleTest and in placement/test_read_ahead.py."""

from __future__ import annotations

import pytest
import torch

from accelerate_cpp._native import AheadCopies, ReadAhead
from accelerate_cpp.errors import InvalidArgument


def test_memory_is_read_ahead_by_its_address() -> None:
    weights = [torch.ones(1000), torch.ones(500), torch.ones(10)]
    reader = ReadAhead(units=[[(each.data_ptr(), each.nbytes)] for each in weights], window_bytes=2010)
    assert reader.bytes_ahead == 0
    reader.arrive(0)
    reader.await_idle()
    assert reader.bytes_ahead == 2010, "of the other two"
    with pytest.raises(InvalidArgument, match="unit 3 of 3 units"):
        reader.arrive(3)


def test_copies_are_for_devices_with_streams() -> None:
    with pytest.raises(RuntimeError, match="stream"):
        AheadCopies(units=[[(torch.ones(2), torch.float32)]], device=torch.device("cpu"), window_bytes=8)
