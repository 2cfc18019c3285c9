"""The address ``xla://``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_xla import runtime


def _rendezvous(url: str, timeout: timedelta = timedelta(seconds=60), **_: Any) -> Iterator[tuple[Any, int, int]]:
    rank, size = runtime.global_ordinal(), runtime.world_size()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, timeout)
    yield store, rank, size


dist.register_rendezvous_handler("xla", _rendezvous)
