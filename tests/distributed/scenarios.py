"""Sentences about data parallelism, each a function that every rank of one start of processes calls.

A scenario has a shared-memory communicator of its own, so that one that fails leaves the others alone; and torch's
default process group, over Gloo: with it torch's own wrapper is trained, which ours is compared with.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

# Torch is imported inside the functions: the process that collects the tests needs none of it.

TIMEOUT = timedelta(seconds=120)


def outlive_the_others(store: Any, rank: int, size: int) -> None:
    """The end of a process that used torch's TCP store: rank 0, which serves it, leaves last."""
    if rank > 0:
        store.set(f"gone/{rank}", "")
    elif size > 1:
        store.wait([f"gone/{peer}" for peer in range(1, size)], TIMEOUT)


@dataclass
class Ranks:
    """This process's place among the ranks, and what it trains with."""

    rank: int
    size: int
    communicator: Any

    def wrap(self, module: Any, **options: Any) -> Any:
        """``module`` in our wrapper."""
        from accelerate_cpp.parallel.data_parallel import DataParallel

        return DataParallel(module, self.communicator, TIMEOUT, **options)

    def pair(self, make: Callable[[], Any], options: dict[str, Any] | None = None, **ddp: Any) -> tuple[Any, Any]:
        """The same model in our wrapper and in torch's. Ranks begin with different weights: those of rank 0 count."""
        import torch

        torch.manual_seed(self.rank)
        ours = self.wrap(make(), **(options or {}))
        torch.manual_seed(self.rank)
        return ours, torch.nn.parallel.DistributedDataParallel(make(), **ddp)

    def batch(self, step: int, *shape: int) -> Any:
        """A random tensor, another one on every rank and in every step."""
        import torch

        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + self.rank))


class Scenarios(dict[str, Callable[[Ranks], None]]):
    """The scenarios of a test file by name; the name is the sentence that must hold."""

    def add(self, function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        """A decorator."""
        self[function.__name__] = function
        return function

    def run(self) -> dict[str, str]:
        """Called in each process. Returns the traceback of every scenario that failed on this rank."""
        import torch.distributed as dist

        from accelerate_cpp._native import create_backend

        shared, rank, size = next(dist.rendezvous("env://"))
        failures = {}
        for name, function in self.items():
            own, gloo = dist.PrefixStore(f"{name}/shm", shared), dist.PrefixStore(f"{name}/gloo", shared)
            dist.init_process_group("gloo", store=gloo, rank=rank, world_size=size, timeout=TIMEOUT)
            try:
                function(Ranks(rank, size, create_backend(own, rank, size, TIMEOUT).communicator))
            except Exception:
                failures[name] = traceback.format_exc()
            dist.destroy_process_group()
        outlive_the_others(shared, rank, size)
        return failures
