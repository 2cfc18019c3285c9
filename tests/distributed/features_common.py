"""What the checks of torch's features share: the place among the ranks, and a small training.

Only the processes that run the checks import this file and the files ``features_<area>.py``: it needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

TIMEOUT = timedelta(seconds=120)
STEPS = 4
# A step's batch, divided among the ranks that share it.
ROWS = 16
INPUTS, HIDDEN, OUTPUTS = 6, 10, 3


@dataclass(frozen=True)
class Ranks:
    """This process's place in the default group, which is this check's own, and a folder that all ranks share."""

    backend: str
    rank: int
    size: int
    folder: Path
    store: dist.Store

    @property
    def name(self) -> str:
        """What ``init_process_group`` and ``new_group`` are told."""
        return f"cpu:{self.backend}"

    def mesh(self, *shape: int, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
        """All ranks as a device mesh; without a shape in one dimension."""
        return init_device_mesh("cpu", shape or (self.size,), mesh_dim_names=names)

    def values(self, count: int, rank: int | None = None) -> Tensor:
        """Small whole numbers, others on every rank, exact in every dtype whatever the order of summation."""
        return (torch.arange(count) * 7 + (self.rank if rank is None else rank) * 3) % 5 + 1.0

    def everyone(self, count: int) -> list[Tensor]:
        """The values of all ranks."""
        return [self.values(count, rank) for rank in range(self.size)]

    def total(self, count: int) -> Tensor:
        """Their sum."""
        return torch.stack(self.everyone(count)).sum(0)

    def wait_for(self, event: str) -> None:
        """Returns when some rank has told of ``event``: an order of things that no collective brings about."""
        self.store.wait([event], TIMEOUT)

    def tell(self, event: str) -> None:
        self.store.add(event, 1)  # which, unlike set, returns when the store has it


def check(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def refused(*texts: str, kind: type[BaseException] = Exception, by: str = "") -> Iterator[None]:
    """The block raises an error with one of ``texts`` in its message, or, where it has none, in the function ``by``."""
    with pytest.raises(kind, match="|".join(map(re.escape, texts))) as caught:
        yield
    assert not by or caught.traceback[-1].name == by


class Network(nn.Module):
    """Two linear layers; the second bias has three elements, which no number of ranks here divides."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, hidden)
        self.second = nn.Linear(hidden, OUTPUTS)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.first(inputs)))
        return result


def network(**options: Any) -> Network:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Network(**options)


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one of the equal parts of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS, INPUTS, generator=generator)
    targets = torch.randn(ROWS, OUTPUTS, generator=generator)
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]


def optimizer_for(module: nn.Module) -> torch.optim.Optimizer:
    """SGD: a gradient of a wrong scale shows in the weights, which Adam would hide."""
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    part: int = 0,
    parts: int = 1,
    clip: float | None = None,
) -> nn.Module:
    """Four steps on one part of each batch; ``module`` again."""
    optimizer = optimizer or optimizer_for(module)
    for step in range(STEPS):
        inputs, targets = batch(step, part, parts)
        nn.functional.mse_loss(module(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return module


def whole(tensor: Tensor) -> Tensor:
    """``tensor`` itself, or all of a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_weights(module: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    """``module`` has the weights of ``expected``, in the same order, whole or sharded."""
    ours, theirs = list(module.parameters()), list(expected.parameters())
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        check(whole(own.detach()), other.detach(), tolerance)
