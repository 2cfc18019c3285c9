"""Backends over several hosts, as the C++ module makes them; tests/distributed/test_hosts.py runs them for real."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from accelerate_cpp._native import create_hierarchical_backend
from accelerate_cpp.errors import InvalidArgument


def never_connected(store: dist.Store, rank: int, size: int) -> dist.Backend:
    raise AssertionError("no engine is needed")


def test_every_rank_has_a_host() -> None:
    with pytest.raises(InvalidArgument, match="expected the host of each of 2 ranks, found 3"):
        create_hierarchical_backend(dist.HashStore(), 0, 2, [0, 0, 1], timedelta(seconds=1), never_connected)
