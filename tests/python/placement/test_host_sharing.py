"""Weights that the processes of a host share; what takes several processes is in tests/distributed."""

from __future__ import annotations

import os

import pytest
import torch

from accelerate_cpp.errors import SystemFailure
from accelerate_cpp.placement import host_sharing
from accelerate_cpp.placement.host_sharing import share_on_host


def test_one_process_keeps_its_tensors() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    shared = share_on_host({"weight": weight})
    assert shared["weight"].data_ptr() == weight.data_ptr()
    assert not shared["weight"].requires_grad


def test_a_file_has_the_tensors_at_their_places() -> None:
    tensors = {"a": torch.arange(3.0), "none": torch.empty(0), "t": torch.arange(6).reshape(2, 3).t()}
    layout, total = host_sharing._layout_of(tensors)
    assert [begin for _, _, _, begin in layout] == [0, 64, 64]
    segment, error = host_sharing._segment_with(tensors, layout, total)
    assert error is None
    assert segment is not None
    views, error = host_sharing._views(os.getpid(), host_sharing._file_of(segment), layout, total)
    del segment
    assert error is None
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors.items())
    views["a"][0] = 5
    assert tensors["a"][0] == 0


def test_another_file_is_not_taken_for_it() -> None:
    with open(os.devnull, "rb") as file:
        views, error = host_sharing._views(os.getpid(), (file.fileno(), 0, 0), [], 64)
    assert views == {}
    assert error is not None


def test_too_little_memory_is_told_of() -> None:
    before = set(os.listdir("/proc/self/fd"))
    segment, error = host_sharing._segment_with({}, [], 1 << 60)
    assert segment is None
    assert len(os.listdir("/proc/self/fd")) == len(before), "the file is closed"
    with pytest.raises(SystemFailure, match=r"process 1 got no memory that its host shares .*allocating 1152921504"):
        host_sharing._raise_first([(1, (3, 0, 0), None), (2, None, error)])
