"""Two ways to bring what each process has to all others, and what they computed for it back: gathering, and a ring.

Each process calls the same methods in the same order. What is transported is one contiguous tensor of one dimension, of
the same length on all processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from accelerate_cpp.comm.single_tensors import all_gather_single, reduce_scatter_single

__all__ = ["Gathering", "Ring", "Transport"]


class Transport(Protocol):
    """Brings the tensors of all processes here, and sums to where they belong."""

    def each(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The rank and the tensor of each process, from this one's ``own`` backwards: r, r-1, …, r+1."""

    def add(self, part: torch.Tensor) -> None:
        """Adds ``part`` to the sum for the process whose tensor :meth:`each` gave last; called once for each."""

    def sum(self) -> torch.Tensor:
        """The sum of what all processes added for this one."""


class Gathering:
    """All tensors are gathered at once while the first is in use, and the sums are scattered at the end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._source = self._rank
        self._parts: torch.Tensor | None = None

    def each(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        whole = own.new_empty(self._size, own.numel())
        gathering = all_gather_single(whole.view(-1), own, group=self._group, async_op=True)
        yield self._rank, own
        gathering.wait()
        for step in range(1, self._size):
            self._source = (self._rank - step) % self._size
            yield self._source, whole[self._source]

    def add(self, part: torch.Tensor) -> None:
        if self._parts is None:
            self._parts = part.new_empty(self._size, part.numel())
        self._parts[self._source] = part

    def sum(self) -> torch.Tensor:
        assert self._parts is not None
        own = torch.empty_like(self._parts[0])
        reduce_scatter_single(own, self._parts.view(-1), group=self._group)
        return own


class Ring:
    """Each process hands what it has to the next one while it is in use; sums follow one step behind what they are for.

    Liu et al. 2023, Ring Attention with Blockwise Transformers, arXiv:2310.01889.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self._rank + 1) % self._size)
        self._previous = dist.get_global_rank(group, (self._rank - 1) % self._size)
        self._sum: _Passing | None = None

    def each(self, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        here = own
        for step in range(self._size):
            passing = self._pass_on(here) if step + 1 < self._size else None
            yield (self._rank - step) % self._size, here
            if passing is not None:
                here = passing.wait()

    def add(self, part: torch.Tensor) -> None:
        if self._sum is not None:
            part += self._sum.wait()
        self._sum = self._pass_on(part)

    def sum(self) -> torch.Tensor:
        assert self._sum is not None
        return self._sum.wait()

    def _pass_on(self, tensor: torch.Tensor) -> _Passing:
        arriving = torch.empty_like(tensor)
        calls = [
            dist.P2POp(dist.isend, tensor, self._next, self._group),
            dist.P2POp(dist.irecv, arriving, self._previous, self._group),
        ]
        return _Passing(dist.batch_isend_irecv(calls), tensor, arriving)


class _Passing:
    """A tensor on its way to the next process, and one that comes from the previous."""

    def __init__(self, works: list[dist.Work], leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        self._works = works
        self._leaving: torch.Tensor | None = leaving  # read until it has left
        self._arriving = arriving

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        self._leaving = None
        return self._arriving
