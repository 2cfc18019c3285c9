"""Sentences about data parallelism, each a function that every rank of one start of processes calls.

A scenario has a shared-memory communicator of its own, so that one that fails leaves the others alone; and torch's
default process group, over Gloo: with it torch's own wrapper is trained, which ours is compared with.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

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
    device_group: Any = None  # what sums gradients, as on accelerators

    def wrap(self, module: Any, **options: Any) -> Any:
        """``module`` in our wrapper."""
        from accelerate_cpp.parallel.data_parallel import DataParallel

        make = None if self.device_group is None else lambda: self.device_group
        return DataParallel(module, self.communicator, TIMEOUT, make_device_group=make, **options)

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


def failures_of(scenarios: Mapping[str, Callable[..., None]], backend: str, *arguments: Any) -> dict[str, str]:
    """Calls each of ``scenarios`` with ``arguments`` on all CPU processes; the tracebacks of those that fail here."""
    import torch

    from accelerate_cpp import PartialState

    torch.set_num_threads(1)
    state = PartialState(cpu=True, backend=backend)
    assert state.backend == backend
    failures = {}
    for name, function in scenarios.items():
        try:
            function(*arguments)
        except (Exception, pytest.fail.Exception):
            failures[name] = traceback.format_exc()
        state.wait_for_everyone()
    return failures


def close(own: Any, other: Any, name: str, relative: float = 1e-6, absolute: float = 1e-6) -> None:
    """Both tensors have the same layout and, but for rounding, the same values."""
    import torch

    assert own.layout == other.layout, f"{name}: {own.layout} where torch has {other.layout}"
    own, other = own.detach().to_dense(), other.detach().to_dense()
    if own.is_floating_point() and own.element_size() == 2 and own.numel() > 0:
        # Gloo rounds a sum of values of 16 bits after every term, ours does at the end.
        relative = 2 * torch.finfo(own.dtype).eps
        absolute = relative * float(other.abs().max())
    torch.testing.assert_close(own, other, rtol=relative, atol=absolute, msg=lambda text: f"{name}: {text}")


def same_gradients(ours: Any, theirs: Any) -> None:
    """Where one of the models has a gradient the other has the same, within 1e-6."""
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), f"{name}: {own.grad} where torch has {other.grad}"
        if own.grad is not None:
            close(own.grad, other.grad, name)


def same_state(ours: Any, theirs: Any) -> None:
    """The models have the same parameters and buffers."""
    for (name, own), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        close(own, other, name, relative=1e-5)


def compare_passes(
    ours: Any, theirs: Any, passes: Callable[[Any, int], Iterator[None]], steps: int = 4, momentum: float = 0.9
) -> None:
    """Trains both and compares gradients after every backward pass and all state at the end.

    Args:
        passes: called with a model and the number of a step, yields after each of its backward passes.
    """
    import torch

    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum) for model in (ours, theirs)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for _ in zip(passes(ours, step), passes(theirs, step), strict=True):
            same_gradients(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
    same_state(ours, theirs)


def compare_training(ours: Any, theirs: Any, loss: Callable[[Any, int], Any], **options: Any) -> None:
    """As :func:`compare_passes`, with one backward pass per step, from ``loss(model, step)``."""

    def passes(model: Any, step: int) -> Iterator[None]:
        loss(model, step).backward()
        yield

    compare_passes(ours, theirs, passes, **options)


class Scenarios(dict[str, Callable[[Ranks], None]]):
    """The scenarios of a test file by name; the name is the sentence that must hold."""

    def add(self, function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        """A decorator."""
        self[function.__name__] = function
        return function

    def run(self, through_group: bool = False) -> dict[str, str]:
        """Called in each process. Returns the traceback of every scenario that failed on this rank.

        Args:
            through_group: gradients are summed by the default process group, as they are on accelerators.
        """
        import torch.distributed as dist

        from accelerate_cpp._native import create_backend

        shared, rank, size = next(dist.rendezvous("env://"))
        failures = {}
        for name, function in self.items():
            own, gloo = dist.PrefixStore(f"{name}/shm", shared), dist.PrefixStore(f"{name}/gloo", shared)
            dist.init_process_group("gloo", store=gloo, rank=rank, world_size=size, timeout=TIMEOUT)
            try:
                communicator = create_backend(own, rank, size, TIMEOUT).communicator
                function(Ranks(rank, size, communicator, dist.group.WORLD if through_group else None))
            except (Exception, pytest.fail.Exception):  # the latter, from pytest.raises, is none of the former
                failures[name] = traceback.format_exc()
            dist.destroy_process_group()
        outlive_the_others(shared, rank, size)
        return failures
