"""Sentences about backend shm, each a function that every rank of one start of processes calls.

A scenario has a default group of its own, so that one that fails leaves the others alone.
"""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest

from scenarios import outlive_the_others

# Torch is imported inside the functions: they run in processes of their own, and the collecting one needs none of it.

Scenario = Callable[[int, int], None]
FLOATING = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATING, "int8", "int16", "int32", "int64", "uint8", "bool")
TIMEOUT = timedelta(seconds=120)


def register() -> Any:
    """torch.distributed, which knows backend shm."""
    import torch.distributed as dist

    from accelerate_cpp.comm.backend import register as register_backend

    register_backend()
    return dist


class ShmScenarios(dict[str, Scenario]):
    """The scenarios of a test file by name; the name is the sentence that must hold."""

    def add(self, function: Scenario) -> Scenario:
        """A decorator. ``function(rank, size)`` is called on every rank of one group."""
        self[function.__name__] = function
        return function

    def run(self) -> dict[str, str]:
        """Called in each process. Returns the traceback of every scenario that failed on this rank."""
        import warnings

        warnings.simplefilter("ignore", FutureWarning)
        dist = register()
        store, rank, size = next(dist.rendezvous("env://"))
        failures = {}
        for name, function in self.items():
            own = {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": size}
            dist.init_process_group("cpu:shm", timeout=TIMEOUT, **own)
            try:
                function(rank, size)
            except Exception:
                failures[name] = traceback.format_exc()
            dist.destroy_process_group()
        outlive_the_others(store, rank, size)
        return failures


def report(failures: list[dict[str, str]], name: str) -> str:
    """What went wrong in a scenario, by rank; empty when nothing did."""
    return "\n".join(f"rank {rank}: {own[name]}" for rank, own in enumerate(failures) if name in own)


def check(actual: Any, expected: Any, exact: bool = True) -> None:
    import torch

    torch.testing.assert_close(actual, expected, **({"rtol": 0, "atol": 0} if exact else {}))


@contextmanager
def refused(kind: str, text: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block raises an error whose class is called ``kind`` with ``text`` in its message."""
    with pytest.raises(Exception, match=re.escape(text)) as caught:
        yield caught
    assert caught.type.__name__ == kind


def operand(rank: int, count: int, dtype: str) -> Any:
    """Small positive integers, exact in every dtype whatever the order of summation."""
    import torch

    values = (torch.arange(count) * 7 + rank * 3) % 5 + 1
    return (values > 3) if dtype == "bool" else values.to(getattr(torch, dtype))


def expected_reduction(op: str, size: int, count: int, dtype: str) -> Any:
    """The reduction of the operands of all ranks."""
    import torch

    if dtype == "bool":  # as numbers that are then compared with 0
        numbers = torch.stack([operand(rank, count, dtype) for rank in range(size)])
        return numbers.all(0) if op in ("MIN", "PRODUCT") else numbers.any(0)
    operands = [operand(rank, count, dtype).double() for rank in range(size)]
    combine: dict[str, Callable[[Any, Any], Any]] = {"MIN": torch.minimum, "MAX": torch.maximum}
    combine |= {"PRODUCT": operator.mul}
    combined = reduce(combine.get(op, operator.add), operands)
    return (combined / size if op == "AVG" else combined).to(getattr(torch, dtype))


def meet(event: str, rank: int, size: int) -> None:
    """Returns when all ranks have come here, without a collective. Rank 0 serves the store, so it leaves last."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.set(f"{event}/{rank}", "")
    store.wait([f"{event}/{peer}" for peer in range(size)], TIMEOUT)
    if rank == 0:
        store.wait([f"{event}/{peer} leaves" for peer in range(1, size)], TIMEOUT)
    else:
        store.set(f"{event}/{rank} leaves", "")


def tell(event: str) -> None:
    """See :func:`wait_for`."""
    import torch.distributed as dist

    dist.distributed_c10d._get_default_store().set(event, "")


def wait_for(event: str) -> None:
    """Returns when some rank has told of ``event``: an order of things that no collective brings about."""
    import torch.distributed as dist

    dist.distributed_c10d._get_default_store().wait([event], TIMEOUT)
